"""Reproduction of a trial from its record: `hpo best --reproduce`.

The same trial on the same kind of device, with the same versions and number of threads, gives the same bits:
every step takes its batch and its dropout masks from the seed. Recorded conditions are compared too, so a
different result comes with possible causes.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from hpo.config.limits import MEASURED_METRICS
from hpo.config.trial_config import build_trial_config
from hpo.config.trial_settings import BUDGETS
from hpo.outcome import Outcome
from hpo.training.evaluate import Evaluation
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks, StoredTrial

_logger = logging.getLogger(__name__)

DEVICE = ("name", "compute_capability", "gcn_arch", "cpu_features", "num_threads")
VERSIONS = ("torch", "transformers", "cuda", "rocm")
MAX_SHOWN = 8

Conditions = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """A value of the record, and the value now. None: there is none."""

    name: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: recorded {_shown(self.recorded)}, now {_shown(self.now)}"


@dataclass(frozen=True)
class Reproduction:
    """Comparison of the repeated trial with the record. JSON-able by `as_json`."""

    trial: int
    outcome: str
    reason: str
    """The reason of another end than `complete`."""
    num_evaluations: int
    results: tuple[Difference, ...]
    """Different metrics of evaluations, in any bit."""
    weights: Literal["same", "different", "not recorded"]
    """The digests of the best weights."""
    conditions: tuple[Difference, ...]
    """Different device, versions and the like."""
    cautions: tuple[str, ...]
    """Reasons why the same conditions may give other bits."""

    @property
    def same(self) -> bool:
        return self.outcome == Outcome.COMPLETE and not self.results and self.weights != "different"

    def as_json(self) -> dict[str, Any]:
        return {"same": self.same, **asdict(self)}

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        compared = f"all metrics of {self.num_evaluations} evaluations"
        if self.same:
            weights = "" if self.weights == "same" else "; the record has no digest of the weights"
            also = " and the best weights" if self.weights == "same" else ""
            yield f"Trial {self.trial} is reproduced bit for bit: {compared}{also} are the same{weights}."
        elif self.outcome != Outcome.COMPLETE:
            yield f"Trial {self.trial} is not reproduced: it ended as {self.outcome}. {self.reason}"
        else:
            yield f"Trial {self.trial} is not reproduced bit for bit. The best weights: {self.weights}."
            yield from (f"  {one}" for one in self.results[:MAX_SHOWN])
            if (more := len(self.results) - MAX_SHOWN) > 0:
                yield f"  ... and {more} more metrics"
        if self.conditions:
            yield "These conditions differ:"
            yield from (f"  {one}" for one in self.conditions)
        elif not self.same:
            yield "No recorded condition differs: device, versions, threads and data are the same."
        if not self.same:
            yield from self.cautions


def reproduce(executor: Executor, trial: StoredTrial, folder: Path) -> Reproduction:
    """Train `trial` again and compare. `folder` takes its checkpoints; the study is not changed.

    Its data and code must be those of the record, which the caller checks.
    """
    params, cautions = _params(executor, trial)
    evaluations: dict[int, Mapping[str, Any]] = {}

    def note(evaluation: Evaluation) -> None:
        evaluations[evaluation.step] = evaluation.metrics
        _logger.info("trial %d, trained again: step %d", trial.number, evaluation.step)

    with _threads(trial.telemetry.get("device", {}).get("num_threads")):
        result = executor.run(params, folder, "reproduction", Callbacks(note))
    digests = [of.get("weights_digest") for of in (trial.telemetry, result.telemetry)]
    return Reproduction(
        trial.number,
        result.outcome,
        "" if result.outcome == Outcome.COMPLETE else result.reason,
        len(evaluations),
        tuple(_differences(_flat(trial.evaluations), _flat(evaluations))),
        "not recorded" if digests[0] is None else "same" if digests[0] == digests[1] else "different",
        tuple(_differences(_conditions(trial.telemetry), _conditions(result.telemetry))),
        tuple(cautions),
    )


def _params(executor: Executor, trial: StoredTrial) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters to train with, and reasons for other bits than in the record."""
    params, telemetry, cautions = dict(trial.params), trial.telemetry, []
    study = executor.study
    config = build_trial_config(study, params, executor.resolved.preset_precision, executor.amp)
    if config.max_seconds is not None:
        params = {name: value for name, value in params.items() if name not in BUDGETS}
        params["max_steps"] = telemetry["num_steps"]
        cautions.append(
            f"The budget was {config.max_seconds:g} seconds, so learning rates followed the clock. Now the "
            f"budget is the {telemetry['num_steps']} steps that the trial made."
        )
    if parts := telemetry.get("fp32_parts"):  # found by `auto`, perhaps in another trial
        params["fp32_parts"] = parts["resolved"]
    if config.max_seconds is not None and telemetry.get("stopped_early"):
        cautions.append("The trial ended early, so its evaluations fell at other steps of its whole budget.")
    if telemetry.get("oom_halvings"):
        params["micro_batch_size"] = telemetry["micro_batch_size"]
        cautions.append(
            f"The trial ran out of memory and halved its micro-batch to {telemetry['micro_batch_size']}. At "
            "which step is not recorded, and sums of other micro-batches may differ in the last bits."
        )
    if "resumed_from_step" in telemetry:
        cautions.append(f"The trial was resumed at step {telemetry['resumed_from_step']}.")
    if measured := [one.metric for one in study.objective if one.metric in MEASURED_METRICS]:
        cautions.append(
            f"The objective {measured[0]} is measured, so another evaluation may be the best one."
        )
    return params, cautions


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Use the recorded number of CPU threads: other partial sums differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flat(evaluations: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return metrics by names such as `evaluation 1: topic/accuracy`, and the step of each evaluation."""
    flat: dict[str, Any] = {}
    for number, (step, metrics) in enumerate(sorted(evaluations.items()), start=1):
        flat[f"evaluation {number}: step"] = step
        for task, task_metrics in metrics.items():
            if isinstance(task_metrics, Mapping):  # not the objectives, which are made of these
                flat |= {f"evaluation {number}: {task}/{name}": value for name, value in task_metrics.items()}
    return flat


def _conditions(telemetry: Mapping[str, Any]) -> Conditions:
    device, precision = telemetry.get("device", {}), telemetry.get("precision", {})
    facts = {name: device.get(name) for name in (*DEVICE, *VERSIONS)}
    names = ("num_ranks", "num_steps", "micro_batch_size")
    return {
        **facts,
        "precision": precision.get("effective"),
        "fp32_parts": list((telemetry.get("fp32_parts") or {}).get("resolved", ())),
        "environment": telemetry.get("environment") or {},
        **{name: telemetry.get(name) for name in names},
    }


def _differences(recorded: Conditions, now: Conditions) -> Iterator[Difference]:
    for name in [*recorded, *(name for name in now if name not in recorded)]:
        if recorded.get(name) != now.get(name):
            yield Difference(name, recorded.get(name), now.get(name))


def _shown(value: Any) -> str:
    return "nothing" if value in (None, {}, []) else str(value)
