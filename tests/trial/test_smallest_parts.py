"""The smallest set of parts in fp32: as a search over sets, and on models that break on purpose."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from broken_models import altered, cancelling_layer, product_loss, sharp_attention, wide_head, wide_layer
from tiny import CPU
from tiny_encoders import BERT, make_model
from torch import Tensor

from hpo.errors import ModelError
from hpo.models.model_parts import set_float32_parts
from hpo.models.multitask import MultitaskModel
from hpo.precision.table import Support
from hpo.trial.compat import Compatibility
from hpo.trial.executor import Executor
from hpo.trial.measure import Measurement
from hpo.trial.smallest_parts import smallest_parts
from hpo.trial.verify import PrecisionCheck, check_precision, propose_parts

UNITS = (
    "embeddings",
    "encoder.layer.0",
    "encoder.layer.1",
    "encoder.layer.2",
    "heads.label",
    "heads.spans",
    "loss",
)
HAS_ATTENTION = {f"encoder.layer.{layer}.attention" for layer in range(3)}


def covered(parts: tuple[str, ...]) -> set[str]:
    """What is in fp32, in the smallest pieces."""
    pieces = {
        "attention": HAS_ATTENTION,
        "heads": {"heads.label", "heads.spans", "pool"},
        **{f"encoder.layer.{n}": {f"encoder.layer.{n}", f"encoder.layer.{n}.attention"} for n in range(3)},
    }
    return set().union(*(pieces.get(part, {part}) for part in parts))


def smallest(needed: set[str], **settings: str) -> tuple[tuple[str, ...] | None, int]:
    """What is found where all that is `needed` must be covered, and how many sets were asked for."""
    asked: list[tuple[str, ...]] = []

    def is_ok(parts: tuple[str, ...]) -> bool:
        asked.append(parts)
        return needed <= covered(parts)

    return smallest_parts(three_layers(**settings), is_ok), len(set(asked))


@cache
def three_layers(**settings: str) -> MultitaskModel:
    return make_model(BERT | {"num_hidden_layers": 3}, **settings)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_exactly_what_is_needed_is_found(size: int) -> None:
    for needed in itertools.combinations(UNITS, size):
        if needed == ("heads.label", "heads.spans"):
            continue  # `heads` is one part
        found, num_asked = smallest(set(needed))
        assert set(found) == set(needed)
        assert num_asked <= 60


@pytest.mark.parametrize(
    ("needed", "settings", "found"),
    [
        ({"heads.label", "heads.spans"}, {}, ("heads",)),
        ({"pool"}, {"pooling": "attention"}, ("heads",)),
        ({"pool", "loss"}, {"pooling": "attention"}, ("loss", "heads")),
        (HAS_ATTENTION, {}, ("attention",)),
        (HAS_ATTENTION | {"loss"}, {}, ("attention", "loss")),
        ({"encoder.layer.1.attention"}, {}, ("encoder.layer.1",)),
        ({"something else"}, {}, None),
    ],
)
def test_parts_that_overlap(
    needed: set[str], settings: dict[str, str], found: tuple[str, ...] | None
) -> None:
    assert smallest(needed, **settings)[0] == found


def test_an_impossible_set_is_asked_for_once() -> None:
    assert smallest({"something else"})[1] == 1


def checked(executor: Executor, name: str) -> PrecisionCheck:
    return PrecisionCheck(name, Support("native"), check_precision(executor, name, 0))


@pytest.mark.parametrize(
    ("alter", "name", "parts"),
    [
        (sharp_attention, "fp16", ("attention",)),
        (lambda model: sharp_attention(model, 1), "fp16", ("encoder.layer.1",)),
        (wide_layer, "fp16", ("encoder.layer.1",)),
        (wide_head, "fp16", ("heads.severity",)),
        (cancelling_layer, "bf16", ("encoder.layer.0",)),
        (lambda model: (wide_head(model), wide_layer(model)), "fp16", ("encoder.layer.1", "heads.severity")),
    ],
    ids=["attention", "one layer's attention", "a layer", "a head", "bf16", "a layer and a head"],
)
def test_the_parts_of_models_that_break(
    tmp_path: Path, alter: Callable[[MultitaskModel], object], name: str, parts: tuple[str, ...]
) -> None:
    executor, said = altered(tmp_path, alter), []
    before = checked(executor, name)
    (found,) = propose_parts(executor, [before], 1, said.append)
    assert found.float32_parts == parts
    lines = found.note.partition("times the speed of fp32, with these lines under `training:`\n")[2]
    assert yaml.safe_load(lines) == {f"precision_overrides.{part}": "fp32" for part in parts}
    assert found.with_parts.verdict == "ok"
    assert found.with_parts.measurement.speed_ratio_low > 0, "it is timed"
    assert re.match(rf"looking for the parts that {name} needs .* all together, .* alone \(\d+\)", said[0])
    assert said[1].startswith(f"checking {name} with embeddings, encoder.layer.0")
    assert said[-1].endswith(f"(check {len(said) - 1})")
    assert len(said) == len(set(said))


def test_a_loss_is_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpo.training.losses.loss_sum", product_loss)
    executor = altered(tmp_path)
    (found,) = propose_parts(executor, [checked(executor, "fp16")], 0)
    assert found.float32_parts == ("loss",)


def test_where_no_set_suffices_that_is_said(tmp_path: Path) -> None:
    """A product that the model itself computes, in no module."""

    def alter(model: MultitaskModel) -> None:
        def multiply(_model: object, _inputs: object, logits: dict[str, Tensor]) -> dict[str, Tensor]:
            big = torch.full((1, 1), 1e3)
            return {task: value + (big @ big - big @ big).to(value.dtype) for task, value in logits.items()}

        model.register_forward_hook(multiply)

    executor = altered(tmp_path, alter)
    (found,) = propose_parts(executor, [checked(executor, "fp16")], 0)
    assert (found.float32_parts, found.with_parts) == ((), None)
    assert found.note.endswith("No set of parts in fp32 makes it ok.")


@pytest.mark.parametrize(
    ("alter", "parts"), [(wide_head, ("heads.severity",)), (wide_layer, ())], ids=["possible", "impossible"]
)
def test_parts_that_cannot_be_in_fp32_are_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alter: Callable[[MultitaskModel], object],
    parts: tuple[str, ...],
) -> None:
    """As under flash attention."""

    def refuse_layers(model: MultitaskModel, loss_fn: object, chosen: Sequence[str]) -> None:
        for part in chosen:
            if part == "attention" or part.startswith("encoder.layer."):
                raise ModelError(f"{part}: flash attention computes in fp16 and bf16 alone.")
        set_float32_parts(model, loss_fn, chosen)

    executor = altered(tmp_path, alter)
    before = checked(executor, "fp16")
    monkeypatch.setattr("hpo.trial.verify.set_float32_parts", refuse_layers)
    (found,) = propose_parts(executor, [before], 0)
    assert found.float32_parts == parts
    assert "Not tried in fp32: attention, encoder.layer.0, encoder.layer.1 (" in found.note
    assert "flash attention computes in fp16 and bf16 alone." in found.note


def test_what_is_ok_or_was_not_measured_is_left_as_it_is(tmp_path: Path) -> None:
    fine = Compatibility("ok", (), Measurement("bf16"))
    checks = [
        PrecisionCheck("bf16", Support("native"), fine),
        PrecisionCheck("tf32", Support("unsupported", "no GPU"), None, "no GPU"),
    ]
    executor = altered(tmp_path)
    executor.device = CPU
    assert propose_parts(executor, checks, 0) == checks
