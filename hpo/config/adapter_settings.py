"""Which settings exclude each other where an adapter is trained, or none."""

from __future__ import annotations

from collections.abc import Iterator

from hpo.config.search_space import CategoricalDistribution, SearchSpace
from hpo.config.study_file import Problem
from hpo.config.trial_settings import TrialSettings

ADAPTER, BASE = "adapter", "base_precision"
OF_ADAPTERS = (BASE, "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "lora_learning_rate")
NEEDS_ADAPTER = (
    "says how the frozen weights under an adapter are stored, and with `adapter: none` nothing is frozen."
)
NEEDS_NONE = "must be 0 with an adapter, under which all of the encoder is frozen."


def trial_problems(settings: TrialSettings) -> Iterator[Problem]:
    """Of one trial."""
    if settings.adapter == "none" and settings.base_precision != "fp32":
        yield Problem((BASE,), f"{NEEDS_ADAPTER} Set `adapter: lora`, or leave it out.")
    if settings.adapter != "none" and settings.freeze_layers:
        yield Problem(("freeze_layers",), NEEDS_NONE)


def study_problems(training: TrialSettings, space: SearchSpace) -> Iterator[Problem]:
    """Of a study: what some of its trials could not be."""
    searched = space.get(ADAPTER)
    adapters = searched.choices if isinstance(searched, CategoricalDistribution) else (training.adapter,)
    if set(adapters) == {"none"}:
        for name in OF_ADAPTERS:
            if name in space or getattr(training, name) != TrialSettings.model_fields[name].default:
                where = ("search_space" if name in space else "training", name)
                yield Problem(where, "is for adapters, but there is none. Set `training.adapter: lora`.")
    for name, neutral, why in ((BASE, "fp32", NEEDS_ADAPTER), ("freeze_layers", 0, NEEDS_NONE)):
        allowed = [one for one in adapters if (one == "none") == (name != BASE)]
        hint = f" Search it with `when: {{adapter: [{', '.join(allowed)}]}}`." if allowed else ""
        one = space.get(name)
        if one is None:
            values, where, of = [getattr(training, name)], ("training", name), adapters
        else:
            values, where = [*one.grid()], ("search_space", name)
            of = one.when.get(ADAPTER, adapters)
        is_said = name == BASE and not allowed
        if any(value != neutral for value in values) and not set(of) <= set(allowed) and not is_said:
            yield Problem(where, why + hint)
