"""Fresh encoders for a machine without a network: a configuration of BERT and a tokenizer trained here.

A GPU machine may have no package with MiniLM and no hub. The weights are random, which changes no speed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hpo.data.synthetic import SyntheticRows

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 2048,
    },
    "base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
    },
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 30522,
    },
}
"""The tiny encoder of the tests, and the two published sizes of BERT (arXiv 1810.04805)."""
VOCABULARY = 2000
"""Tokens of the trained tokenizer, at most."""
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_tokenizer(folder: Path) -> Path:
    """Train a WordPiece tokenizer on generated posts and write it into `folder`, in transformers' form."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    posts = (post.text for post in SyntheticRows("tokenizer", 2000))
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    tokenizer.train_from_iterator(posts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(names, SPECIAL_TOKENS, strict=True))
    )
    fast.save_pretrained(folder)
    # transformers looks up the family of a tokenizer here.
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": len(fast)}))
    return folder


def fresh_encoder(folder: Path, size: str = "base") -> dict[str, Any]:
    """Write a tokenizer into `folder`; return the `model.encoder` of a study with a fresh BERT of `size`."""
    return {
        "model_type": "bert",
        "tokenizer": str(write_tokenizer(folder)),
        "max_position_embeddings": 512,
        **SIZES[size],
    }
