"""Decoders: the families that people fine-tune, made small, with tasks of every kind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import hpo_command, ok
from support.command_line import stored as stored_study
from support.every_kind import TASKS, WINDOWS, write_every_kind
from support.jsonl_sets import write_set
from support.resumed_trials import check_resume_is_exact
from support.tiny import CPU, TinyEncoder, write_study
from support.tiny_encoders import BERT, DECODERS, FAMILIES, KIND_TASKS, LABEL, family_encoder, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

import hpo
from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.deploy.onnx_fp32 import export_onnx
from hpo.errors import ModelError
from hpo.models.encoder import is_causal, load_encoder, load_tokenizer
from hpo.models.multitask import pool_last
from hpo.precision.amp import prepare_model
from hpo.precision.table import PRECISIONS
from hpo.trial.executor import Executor

IDS_L = torch.arange(1, 13)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_causal_and_keeps_no_keys(name: str) -> None:
    decoder = load_encoder(DECODERS[name])
    assert is_causal(decoder)
    assert not decoder.training
    with torch.no_grad():
        output = decoder(input_ids=IDS_L[None], attention_mask=torch.ones(1, 12))
    assert output.past_key_values is None


def test_causality_is_measured() -> None:
    assert is_causal(load_encoder({**BERT, "is_decoder": True}))
    assert not any(is_causal(family_encoder(family)) for family in FAMILIES)
    assert not is_causal(TinyEncoder()), "its tokens see only themselves"


@pytest.mark.parametrize("is_left", [False, True])
def test_the_last_token_is_the_last_real_one(is_left: bool) -> None:
    hidden_BLD = torch.arange(24.0).view(2, 4, 3)
    mask_BL = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    mask_BL = mask_BL.flip(1) if is_left else mask_BL
    expected = torch.stack([hidden_BLD[0, 3 if is_left else 1], hidden_BLD[1, 3]])
    assert torch.equal(pool_last(hidden_BLD, mask_BL), expected)


def test_padding_changes_nothing_on_either_side() -> None:
    model = make_model(DECODERS["llama"], pooling="last").eval()
    ids_BL = IDS_L[None]
    padded = {"right": (0, 4), "left": (4, 0)}
    with torch.no_grad():
        expected = model(ids_BL, torch.ones_like(ids_BL))[LABEL.name]
        for side, widths in padded.items():
            ids, mask = (torch.nn.functional.pad(one, widths) for one in (ids_BL, torch.ones_like(ids_BL)))
            torch.testing.assert_close(model(ids, mask)[LABEL.name], expected, rtol=1e-4, atol=1e-6, msg=side)


def test_the_first_token_of_a_decoder_is_no_pooling() -> None:
    with pytest.raises(ModelError, match=r"`cls` is the state of the first token.* Use last or mean"):
        make_model(DECODERS["qwen3"], pooling="cls")


@pytest.mark.parametrize("name", DECODERS)
def test_rotary_frequencies_stay_in_fp32_under_bf16_weights(name: str) -> None:
    model = prepare_model(make_model(DECODERS[name], tasks=KIND_TASKS), PRECISIONS["bf16-true"])
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    buffers = [buffer for name, buffer in model.named_buffers() if "inv_freq" in name]
    assert buffers
    assert {buffer.dtype for buffer in buffers} == {torch.float32}


def executor_of(folder: Path, name: str) -> Executor:
    """Trials of every kind of task, with gradient checkpointing."""
    training = {**WINDOWS, "max_steps": 8, "gradient_checkpointing": True, "pooling": "last"}
    changes: dict[str, Any] = {"training": training, "amp": {"allow_emulated": True}}
    path = write_every_kind(folder, model={"encoder": DECODERS[name]}, search_space={}, **changes)
    return Executor(resolve_study(load_study(path), CPU), folder / "runs")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", DECODERS)
def test_every_kind_of_task_trains_and_resumes_bit_for_bit(tmp_path: Path, name: str, precision: str) -> None:
    result = check_resume_is_exact(executor_of(tmp_path, name), tmp_path, fp_precision=precision)
    assert result.telemetry["precision"]["agrees"], result.telemetry["precision"]


def test_one_is_searched_exported_and_loaded(tmp_path: Path) -> None:
    path = write_every_kind(tmp_path, model={"encoder": DECODERS["qwen3"]}, search_space={})
    told = ok(hpo_command(tmp_path, "run", path.name))
    assert "In this Qwen3Model a token sees only those before it: what it tells of reason, places" in told.err
    (scored,) = ok(hpo_command(tmp_path, "best", path.name, "--export", "model", "--json")).json["trials"]
    texts = ["late again the parcel came to Rome", "broken !"]
    predictions = hpo.load(tmp_path / "model").predict(texts)
    assert [prediction.keys() for prediction in predictions] == [{*TASKS}, {*TASKS}]
    assert type(AutoModel.from_pretrained(tmp_path / "model")).__name__ == "Qwen3Model"
    again = ok(hpo_command(tmp_path, "best", path.name, "--evaluate", "validation", "--json")).json
    assert again["trials"][0]["number"] == scored["number"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_tied_checkpoint_in_16_bits_is_loaded_in_fp32(
    tmp_path: Path, name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """As these are published: with the head of a language model that is tied to the embeddings."""
    settings = {key: value for key, value in DECODERS[name].items() if key != "model_type"}
    config = AutoConfig.for_model(DECODERS[name]["model_type"], **settings, tie_word_embeddings=True)
    language_model = AutoModelForCausalLM.from_config(config).to(dtype)
    assert language_model.lm_head.weight is language_model.get_input_embeddings().weight
    language_model.save_pretrained(tmp_path)
    load_tokenizer(DECODERS[name]).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "hpo.models"):
        encoders = [load_encoder(str(tmp_path)) for _ in range(2)]
    told = (
        f"{tmp_path} are stored in {str(dtype).removeprefix('torch.')}; they are loaded, and trained, in fp32"
    )
    assert [told in message for message in caplog.messages] == [True], "once"
    stored = load_file(tmp_path / "model.safetensors")
    for key, value in encoders[0].state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, stored[f"model.{key}"].float()), key
    assert not any("lm_head" in key for key in encoders[0].state_dict())
    assert {buffer.dtype for buffer in encoders[0].buffers() if buffer.is_floating_point()} == {torch.float32}


def bare_decoder(folder: Path) -> Path:
    """A checkpoint whose tokenizer has no special token at all, so no padding either."""
    words = ["late", "again", "fine", "the", "parcel", "?"]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    settings = {key: value for key, value in DECODERS["llama"].items() if key != "model_type"}
    none = {"vocab_size": len(words), "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model("llama", **settings | none)).save_pretrained(folder)
    return folder


def bare_rows(split: str, size: int) -> list[dict[str, Any]]:
    """Of unlike lengths, so that batches are padded."""
    texts = ("the parcel again late", "fine", "late", "the parcel fine")
    moods = ("bad", "good", "bad", "good")
    return [
        {"id": f"{split}-{n}", "text": texts[n % 4], "labels": {"mood": moods[n % 4]}} for n in range(size)
    ]


def test_the_last_token_without_special_tokens_from_training_to_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    encoder = bare_decoder(tmp_path / "decoder")
    task = {"mood": {"kind": "single_label", "classes": ["bad", "good"]}}
    write_set(tmp_path / "rows", task, train=bare_rows("t", 32), validation=bare_rows("v", 8))
    training = {"max_steps": 40, "batch_size": 8, "pooling": "last", "learning_rate": 3e-3, "max_length": 16}
    data = {"source": "jsonl", "path": "rows"}
    path = write_study(
        tmp_path, data=data, model={"encoder": str(encoder)}, training=training, search_space={}, n_trials=1
    )
    ok(hpo_command(tmp_path, "run", path.name))
    (trial,) = stored_study(tmp_path).trials
    assert trial.outcome == "complete", trial.reason
    ok(hpo_command(tmp_path, "best", path.name, "--export", "model"))
    model = hpo.load(tmp_path / "model", device="cpu", precision="fp32")
    assert model.tokenizer.pad_token is None
    onnx = hpo.load(export_onnx(model, tmp_path / "onnx"), device="cpu")
    texts = [str(row["text"]) for row in bare_rows("x", 7)]
    together, one_by_one, by_onnx = (
        [one["mood"].scores["bad"] for one in found]
        for found in (model.predict(texts), [model.predict([text])[0] for text in texts], onnx.predict(texts))
    )
    assert together == pytest.approx(one_by_one, abs=1e-5)
    assert together == pytest.approx(by_onnx, abs=1e-5)
    assert [score > 0.5 for score in together] == [n % 4 in (0, 2) for n in range(7)]
