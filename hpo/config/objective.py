"""What a trial is judged by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from hpo.config.limits import ENERGY, unknown_metric
from hpo.config.study_file import CheckedSection, Problem, show
from hpo.tasks.kind import is_error


def smaller_is_better(metric: str) -> bool:
    return metric in ("peak_memory_bytes", ENERGY) or is_error(metric)


class ObjectiveConfig(CheckedSection):
    """What a trial is judged by. A list of these makes a study with several objectives."""

    metric: str = "score"
    """`score` (mean of the tasks' primary metrics, an `r2` below 0 as 0), `<task>/<metric>` such as
    `criteria/f1_micro`, `train_examples_per_second`, `train_tokens_per_second`,
    `evaluation_examples_per_second`, `train_joules_per_example` (an NVIDIA GPU for each worker), or
    `peak_memory_bytes`."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Which way is better."""

    def problems(self) -> Iterator[Problem]:
        if told := unknown_metric(self.metric):
            yield Problem(("metric",), told)
        if smaller_is_better(self.metric) and self.direction == "maximize":
            yield Problem(("direction",), f"must be `minimize` for {show(self.metric)}: smaller is better.")


def as_tuple(value: Any) -> Any:
    return (ObjectiveConfig.model_validate(value),) if isinstance(value, Mapping) else value
