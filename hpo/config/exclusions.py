"""Which settings exclude each other: those of adapters, and optimisers and how their state is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from hpo.config.search_space import SearchSpace
from hpo.config.study_file import Problem
from hpo.config.trial_settings import AUTO, TrialSettings
from hpo.precision.table import BASE_PRECISION, OPTIMIZER_STATE, PRECISION

ADAPTER = "adapter"
OF_ADAPTERS = (
    BASE_PRECISION,
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_targets",
    "lora_learning_rate",
)
NEEDS_ADAPTER = (
    "says how the frozen weights under an adapter are stored, and with `adapter: none` nothing is frozen."
)
NEEDS_NONE = "must be 0 with an adapter, under which all of the encoder is frozen."
PARTS = "fp32_parts"
NEEDS_FLOAT32 = "must be [] with `fp_precision: bf16-true`, whose weights are bf16."
OPTIMIZER = "optimizer"
SHORT_STATE = ("adamw", "adam", "lion")
"""Those whose moments `hpo.training.optimizer_states` knows."""


def trial_problems(settings: TrialSettings) -> Iterator[Problem]:
    if settings.adapter == "none" and settings.base_precision != "fp32":
        yield Problem((BASE_PRECISION,), f"{NEEDS_ADAPTER} Set `adapter: lora`, or leave it out.")
    if settings.adapter != "none" and settings.freeze_layers:
        yield Problem(("freeze_layers",), NEEDS_NONE)
    if settings.optimizer_state != "fp32" and settings.optimizer not in SHORT_STATE:
        yield Problem((OPTIMIZER_STATE,), _needs_moments(settings.optimizer))


def study_problems(training: TrialSettings, space: SearchSpace) -> Iterator[Problem]:
    adapters = _values(ADAPTER, training, space)
    if set(adapters) == {"none"}:
        for name in OF_ADAPTERS:
            if name in space or getattr(training, name) != TrialSettings.model_fields[name].default:
                why = "is for adapters, but there is none. Set `training.adapter: lora`."
                yield Problem(_where(name, space), why)
    for name, neutral, why in ((BASE_PRECISION, "fp32", NEEDS_ADAPTER), ("freeze_layers", 0, NEEDS_NONE)):
        allowed = [one for one in adapters if (one == "none") == (name != BASE_PRECISION)]
        is_said = name == BASE_PRECISION and not allowed
        if not is_said and set(_drawn_with(name, neutral, ADAPTER, training, space)) - {*allowed}:
            yield Problem(_where(name, space), why + _hint(ADAPTER, allowed))
    with_parts = set(_drawn_with(PARTS, (), PRECISION, training, space))
    if "bf16-true" in with_parts:
        yield Problem(
            _where(PARTS, space), NEEDS_FLOAT32 + _hint(PRECISION, sorted(with_parts - {"bf16-true"}))
        )
    for optimizer in _drawn_with(OPTIMIZER_STATE, "fp32", OPTIMIZER, training, space):
        if optimizer not in SHORT_STATE:
            hint = _hint(OPTIMIZER, SHORT_STATE) if OPTIMIZER in space else ""
            yield Problem(_where(OPTIMIZER_STATE, space), _needs_moments(optimizer) + hint)


def measures_parts(training: TrialSettings, space: SearchSpace) -> bool:
    """Whether a trial may have `fp32_parts: auto`."""
    return AUTO in _values(PARTS, training, space)


def _drawn_with(
    name: str, neutral: object, other: str, training: TrialSettings, space: SearchSpace
) -> Collection[Any]:
    """The values of `other` with which a setting may have another value than `neutral`."""
    if all(value == neutral for value in _values(name, training, space)):
        return ()
    others = _values(other, training, space)
    return space[name].when.get(other, others) if name in space else others


def _values(name: str, training: TrialSettings, space: SearchSpace) -> Collection[Any]:
    return space[name].grid() if name in space else (getattr(training, name),)


def _where(name: str, space: SearchSpace) -> tuple[str, str]:
    return ("search_space" if name in space else "training", name)


def _needs_moments(optimizer: object) -> str:
    return f"must be fp32 with `optimizer: {optimizer}`; {', '.join(SHORT_STATE)} can have another."


def _hint(other: str, allowed: Collection[str]) -> str:
    return f" Search it with `when: {{{other}: [{', '.join(allowed)}]}}`." if allowed else ""
