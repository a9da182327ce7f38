"""Decoders: the families that people fine-tune, made small, with tasks of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import hpo_command, ok
from every_kind import TASKS, WINDOWS, write_every_kind
from safetensors.torch import load_file
from tiny import CPU
from tiny_encoders import BERT, DECODERS, FAMILIES, KIND_TASKS, LABEL, family_encoder, make_model
from transformers import AutoModel

import hpo
from hpo.config.study_config import load_study
from hpo.errors import ModelError
from hpo.models.encoder import is_causal, load_encoder
from hpo.models.multitask import pool_last
from hpo.outcome import Outcome
from hpo.precision.amp import prepare_model
from hpo.precision.table import PRECISIONS
from hpo.trial.callbacks import Callbacks
from hpo.trial.executor import Executor
from hpo.trial.telemetry import TrialResult

IDS_L = torch.arange(1, 13)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_causal_by_what_it_does(name: str) -> None:
    decoder = load_encoder(DECODERS[name])
    assert is_causal(decoder)
    assert not decoder.training
    with torch.no_grad():
        output = decoder(input_ids=IDS_L[None], attention_mask=torch.ones(1, 12))
    assert output.past_key_values is None, "no keys and values are kept"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_is_not(family: str) -> None:
    assert not is_causal(family_encoder(family))


def test_bert_as_a_decoder_is_one() -> None:
    assert is_causal(load_encoder({**BERT, "is_decoder": True}))


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


def train(folder: Path, name: str, precision: str, checkpoints: Path, stop_at: int = 0) -> TrialResult:
    """A trial of every kind of task, with gradient checkpointing; it is preempted after so many steps."""
    training = {**WINDOWS, "max_steps": 12, "gradient_checkpointing": True, "pooling": "last"}
    changes: dict[str, Any] = {"training": training, "amp": {"allow_emulated": True}}
    path = write_every_kind(folder, model={"encoder": DECODERS[name]}, search_space={}, **changes)
    executor = Executor(load_study(path), CPU, folder / "runs")
    asked = iter(range(1, 10**6))
    callbacks = Callbacks(should_stop=lambda: next(asked) == stop_at)
    return executor.run({"fp_precision": precision}, checkpoints, "trial", callbacks)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", DECODERS)
def test_every_kind_of_task_is_trained_and_goes_on_bit_by_bit(
    tmp_path: Path, name: str, precision: str
) -> None:
    whole = train(tmp_path, name, precision, tmp_path / "whole")
    assert whole.outcome == Outcome.COMPLETE, whole.reason
    assert whole.telemetry["precision"]["agrees"], whole.telemetry["precision"]
    assert train(tmp_path, name, precision, tmp_path / "cut", stop_at=5).outcome == Outcome.PREEMPTED
    resumed = train(tmp_path, name, precision, tmp_path / "cut")
    assert resumed.telemetry["resumed_from_step"] > 0
    assert resumed.values == whole.values
    first, second = (
        load_file(next((tmp_path / folder).glob("best-*/model.safetensors"))) for folder in ("whole", "cut")
    )
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert first.keys() == second.keys()


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
