"""The plan of a study: what is left of it, before its first trial and as its trials are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from hpo.config.limits import ObjectiveConfig
from hpo.config.sampler_config import PrunerConfig
from hpo.config.search_space import middle
from hpo.config.trial_config import build_trial_config
from hpo.config.trial_settings import BUDGETS
from hpo.errors import RunError
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION
from hpo.report.formats import format_bytes, format_number, format_seconds
from hpo.report.number_formats import study_formats
from hpo.report.outlook import outlook, trial_seconds
from hpo.study.reading.study_record import StudyRecord, TrialRecord, complete_trials
from hpo.study.sampling.forecast import Cost, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.config.resolved_study import ResolvedStudy
    from hpo.config.study_config import StudyConfig

MEASURED_STEPS = 13
"""Steps that are trained where no trial tells; three of them are warm-up."""


@dataclass(frozen=True)
class TrialCost:
    """A whole trial in one precision."""

    precision: str
    examples_per_second: float | None
    """In training."""
    seconds: float
    """With its evaluations and its setup."""
    measured_by: str
    run_seconds: float = 0.0
    """The part of a run that is no training: its setup and one evaluation."""
    checkpoint_bytes: int | None = None
    """Weights and optimizer state, and the best weights; None: unknown."""


@dataclass(frozen=True)
class Plan:
    """What is left of a study."""

    costs: list[TrialCost]
    stages: list[Stage]
    """The runs that are left, if no trial breaks."""
    whole_trials: float
    """The training that is left, in whole trials."""
    hours: float
    """Device time in all, the time that is spent included."""
    spent_hours: float
    num_workers: int
    budget_hours: float | None
    pruner: str
    """The pruner, and why the study has it."""
    paused_bytes: int | None = None
    """Disk space that the checkpoints of paused trials take at most; None: unknown, or no trial pauses."""
    limit: str = ""
    """The losses that no comparison can exclude. Empty: not known, or the objective is in label units."""
    num_shares: int | None = None
    """The workers, or under a budget the devices, that spend device time at once; None: `num_workers`."""

    @property
    def hours_to_the_end(self) -> float:
        """Time on a clock, with these workers."""
        return max(0.0, self.hours - self.spent_hours) / (self.num_shares or self.num_workers)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hours_to_the_end": self.hours_to_the_end}

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for cost in self.costs:
            rate = cost.examples_per_second
            speed = "" if rate is None else f", at {format_number(rate)} examples/s"
            yield f"A trial in {cost.precision}: {format_seconds(cost.seconds)}{speed} ({cost.measured_by})."
        yield f"Pruner: {self.pruner}."
        yield _left_to_run([stage for stage in self.stages if stage.num_trials], self.whole_trials)
        total, spent, budget = (
            None if hours is None else format_seconds(3600 * hours)
            for hours in (self.hours, self.spent_hours or None, self.budget_hours)
        )
        of = f" of the budget of {budget}" if budget else ""
        yield f"Device time in all: about {total}{of}{f', of which {spent} are spent' if spent else ''}."
        if self.budget_hours is not None and self.whole_trials and self.hours > self.budget_hours:
            yield "The budget may not be enough for one whole trial. Raise it, or shorten the trials."
        if self.paused_bytes is not None:
            yield f"Checkpoints of paused trials: at most {format_bytes(self.paused_bytes)} of disk space."
        clock = format_seconds(3600 * self.hours_to_the_end)
        shares, workers = self.num_shares or self.num_workers, self.num_workers
        on = f" on {shares} device{'s' * (shares > 1)}" if shares < workers else ""
        if self.hours_to_the_end:
            yield f"With {workers} worker{'s' * (workers > 1)}{on} the study ends in about {clock}."
        if self.limit:
            yield f"What `hpo compare` can show with these data: {self.limit}"


def _left_to_run(stages: Sequence[Stage], whole_trials: float) -> str:
    parts = []
    for stage in stages:
        end = "to the end" if stage.end == 1 else f"to {stage.end:.0%} of their training"
        if stage.begin == 0:
            parts.append(f"{stage.num_trials} new trials train {end}")
        else:
            parts.append(f"{stage.num_trials} paused trials continue from {stage.begin:.0%} {end}")
    if not parts:
        return "No trial is left to run."
    return f"Left to run: {'; '.join(parts)}. Together they train as much as {whole_trials:.3g} whole trials."


def make_plan(
    config: StudyConfig,
    costs: list[TrialCost],
    record: StudyRecord | None,
    num_workers: int,
    why_pruner: str = "",
) -> Plan:
    """Return what is left of a study, by what its trials took.

    Args:
        costs: used if no trial has trained. Each precision is then as frequent as the others.
        record: None: the study is not stored.
        why_pruner: why the study has its pruner.
    """
    run_seconds = fmean(cost.run_seconds for cost in costs)
    cost = Cost(run_seconds, fmean(cost.seconds for cost in costs) - run_seconds)
    record = record or _empty_record(config)
    found = outlook(record, config.pruner, config.num_trials, config.budget, cost)
    spent = sum(trial_seconds(record, trial) for trial in record.trials)
    sizes = [cost.checkpoint_bytes for cost in costs if cost.checkpoint_bytes is not None]
    promotion, is_left = found.promotion, found.forecast.whole_trials > 0
    num_paused = promotion.most_paused(found.num_planned) if promotion is not None and is_left else 0
    rungs = ", ".join(f"{rung:.0%}" for rung in promotion.used) if promotion is not None else ""
    pauses = f", which pauses trials at {rungs} of their training" if rungs else ""
    return Plan(
        costs,
        [*found.forecast.stages],
        found.forecast.whole_trials,
        (spent + found.seconds) / 3600,
        spent / 3600,
        num_workers,
        config.budget.hours if config.budget else None,
        f"{config.pruner.name}{pauses}; {why_pruner}",
        num_paused * max(sizes) if sizes and num_paused else None,
    )


def _empty_record(config: StudyConfig) -> StudyRecord:
    counts = {"open": config.num_trials, "running": 0, "done": 0}
    return StudyRecord(config.name, (), config.directions, {}, [], [], counts)


def costs_of(record: StudyRecord) -> dict[str, TrialCost]:
    """What whole trials took, by the precision that ran."""
    of_precision: dict[str, list[TrialRecord]] = {}
    for trial in complete_trials(record):
        telemetry = trial.telemetry
        if not telemetry.get("device", {}).get("shared"):
            of_precision.setdefault(telemetry["precision"]["effective"], []).append(trial)
    return {
        name: TrialCost(
            name,
            median([one.attributes.get("train_examples_per_second") or 0.0 for one in trials]) or None,
            median(map(whole_seconds, trials)),
            f"{len(trials)} complete trial{'s' * (len(trials) > 1)}{_differing(record, trials)}",
            checkpoint_bytes=max(one.telemetry.get("checkpoint_bytes") or 0 for one in trials) or None,
        )
        for name, trials in of_precision.items()
    }


def _differing(record: StudyRecord, trials: list[TrialRecord]) -> str:
    """Name the formats that are put together in a cost."""
    differ = study_formats(trials, record.definition).columns
    return f" that differ in {', '.join(differ)}" if differ else ""


def whole_seconds(trial: TrialRecord) -> float:
    """Return the seconds that a whole trial took in one run, with its evaluations."""
    parts = ("setup_seconds", "compile_seconds", "train_seconds", "evaluation_seconds")
    return sum({**trial.telemetry, **trial.attributes}.get(part) or 0.0 for part in parts)


def measure_cost(
    resolved: ResolvedStudy,
    runs_dir: Path,
    precision: str,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrialCost:
    """Train some steps with the settings in the middle of their ranges, and evaluate once.

    Raises:
        RunError: that does not work, or was stopped.
    """
    from hpo.memory import release_free_memory
    from hpo.trial.callbacks import Callbacks
    from hpo.trial.executor import Executor
    from hpo.trial.trial_parts import training_args

    config = resolved.config
    searched = {name: one for name, one in config.search_space.items() if name not in BUDGETS}
    params = middle(searched) | ({PRECISION: precision} if PRECISION in searched else {})
    steps = {**dict.fromkeys(BUDGETS), "max_steps": MEASURED_STEPS}
    short = config.with_values(
        training=config.training.model_copy(update=steps),
        search_space=searched,
        evaluation=config.evaluation.model_copy(update={"per_trial": 1}),
        pruner=PrunerConfig(name="none"),
        objective=(ObjectiveConfig(metric="peak_memory_bytes", direction="minimize"),),
        constraints={},  # so few steps say nothing about quality
    )
    executor = Executor(replace(resolved, config=short), runs_dir)
    result = executor.run(params, None, "plan", Callbacks(should_stop=should_stop))
    release_free_memory(resolved.device)  # the trials may run in other processes
    if result.outcome != Outcome.COMPLETE:
        raise RunError(f"{precision}: {MEASURED_STEPS} steps ended as {result.outcome}: {result.reason}")
    told = {**result.telemetry, **result.headline}
    trial = build_trial_config(config, middle(config.search_space) | params, precision)
    windows = executor.loader.tokens("train", trial).num_windows
    args, rate = training_args(config, trial, windows), told["train_examples_per_second"]
    if rate is None:
        raise RunError(
            f"{precision}: in each of {MEASURED_STEPS} steps something was compiled; none tells the speed."
        )
    seconds = args.budget.max_seconds or (args.budget.max_steps or 0) * args.batch_size / rate
    seconds += len(args.evaluate_at) * told["evaluation_seconds"] + told["setup_seconds"]
    run_seconds = told["setup_seconds"] + told["evaluation_seconds"]
    measured_by = f"{MEASURED_STEPS} steps"
    return TrialCost(precision, rate, seconds, measured_by, run_seconds, told.get("checkpoint_bytes"))
