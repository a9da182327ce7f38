"""Plan of a study: the rest of its trials, their time, and the losses that a comparison can exclude.

The costs come from complete trials, or from some training steps on this machine.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from hpo.compare.comparison_study import unlabelled_test_tasks
from hpo.compare.planning import DEFAULTS, MOST_RUNS
from hpo.config.comparison import ComparisonConfig
from hpo.config.limits import ObjectiveConfig
from hpo.config.resolved_study import ResolvedStudy
from hpo.config.sampler_config import PrunerConfig
from hpo.config.search_space import middle
from hpo.config.study_config import StudyConfig
from hpo.config.trial_config import build_trial_config
from hpo.config.trial_settings import BUDGETS
from hpo.data.dataset import DataSet, load_data
from hpo.errors import DataError, RunError
from hpo.evaluation.decision import runs_needed
from hpo.evaluation.verdict import Question, label_facts
from hpo.memory import release_free_memory
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION
from hpo.report.formats import format_bytes, format_number, format_percent, format_seconds, plural
from hpo.report.status import outlook, trial_seconds
from hpo.report.terminal import Shown
from hpo.report.trial_precision import differing_formats
from hpo.study.reading.study_record import StudyRecord, TrialRecord, complete_trials
from hpo.study.sampling.forecast import Cost, Stage, most_whole_trials, stages_left
from hpo.study.sampling.promotion import Rung
from hpo.tasks.kind import is_error
from hpo.trial.executor import Executor
from hpo.trial.objectives import quality_objective
from hpo.trial.parts import training_args
from hpo.trial.telemetry import Callbacks

_logger = logging.getLogger(__name__)

MEASURED_STEPS = 13  # training steps if there is no complete trial; three of them are warm-up


@dataclass(frozen=True)
class TrialCost:
    precision: str
    examples_per_second: float | None  # training speed
    seconds: float  # time with evaluations and setup
    measured_by: str
    run_seconds: float = 0.0  # time of a run without training: its setup and one evaluation
    spread_seconds: tuple[float, float] | None = None  # shortest and longest of several trials
    checkpoint_bytes: int | None = None  # size of weights, optimizer state and best weights; None: unknown


@dataclass(frozen=True)
class Plan(Shown):
    costs: list[TrialCost]
    stages: list[Stage]  # remaining runs, if no trial breaks
    whole_trials: float  # remaining training, in whole trials
    hours: float  # device time of the whole study, past and future
    spent_hours: float
    num_workers: int
    budget_hours: float | None
    pruner: str  # the pruner and the reason for it
    paused_bytes: int | None = None
    """Most disk space for checkpoints of paused trials; None: unknown, or no trial pauses."""
    limit: str = ""
    """Losses that no comparison can exclude; empty: unknown, or the objective is in label units."""
    most_whole_trials: float = 0.0
    """Remaining training if good results come late (`hpo.study.sampling.forecast`)."""
    num_shares: int | None = None
    """Number of workers, or under a budget of their devices, at work; None: `num_workers`."""

    @property
    def hours_to_the_end(self) -> float:
        """Wall-clock time with these workers."""
        return max(0.0, self.hours - self.spent_hours) / (self.num_shares or self.num_workers)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hours_to_the_end": self.hours_to_the_end}

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for cost in self.costs:
            rate = cost.examples_per_second
            speed = "" if rate is None else f", {format_number(rate)} examples/s"
            spread = " to ".join(map(format_seconds, cost.spread_seconds or ()))
            source = f"({cost.measured_by}{', ' * bool(spread)}{spread})"
            yield f"A trial in {cost.precision}: {format_seconds(cost.seconds)}{speed} {source}."
        yield f"Pruner: {self.pruner}."
        yield self._remaining()
        total = format_seconds(3600 * self.hours) if self.hours else "0 s"
        if self.budget_hours is not None:
            total += f" of the budget of {format_seconds(3600 * self.budget_hours)}"
        if self.spent_hours:
            total += f", {format_seconds(3600 * self.spent_hours)} already spent"
        yield f"Device time in all: about {total}."
        if self.budget_hours is not None and self.whole_trials and self.hours > self.budget_hours:
            yield "The budget may not be enough for one whole trial. Raise it, or shorten the trials."
        if self.paused_bytes is not None:
            yield f"Checkpoints of paused trials: at most {format_bytes(self.paused_bytes)} of disk space."
        if self.hours_to_the_end:
            clock, shares = format_seconds(3600 * self.hours_to_the_end), self.num_shares or self.num_workers
            on = f" on {plural(shares, 'device')}" if shares < self.num_workers else ""
            yield f"With {plural(self.num_workers, 'worker')}{on} the study ends in about {clock}."
        if self.limit:
            yield f"What `hpo compare` can show with these data: {self.limit}"

    def _remaining(self) -> str:
        stages = [stage for stage in self.stages if stage.num_trials]
        if not stages:
            return "No trial is left to run."
        if [(stage.begin, stage.end) for stage in stages] == [(0, 1)]:
            return f"Left to run: {plural(stages[0].num_trials, 'trial')}, full budget."
        parts = []
        for stage in stages:
            trials = plural(stage.num_trials, "trial" if stage.begin == 0 else "paused trial")
            parts.append(f"{trials} from {format_percent(stage.begin)} to {format_percent(stage.end)}")
        whole = f"{self.whole_trials:.3g} full budgets in all"
        if (most := self.most_whole_trials) > self.whole_trials * 1.005:
            whole += f", or up to {most:.3g} by the order of the results"
        return f"Left to run, in shares of a trial's budget: {', '.join(parts)}; {whole}."


def make_plan(
    config: StudyConfig,
    costs: list[TrialCost],
    record: StudyRecord | None,
    num_workers: int,
    why_pruner: str = "",
) -> Plan:
    """Plan the rest of a study by the cost of its trials, or by `costs` if none has trained."""
    run_seconds = fmean(cost.run_seconds for cost in costs)
    cost = Cost(run_seconds, fmean(cost.seconds for cost in costs) - run_seconds)
    record = record or _empty_record(config)
    ahead = outlook(record, config.pruner, config.num_trials, config.budget, cost)
    spent = sum(trial_seconds(record, trial) for trial in record.trials)
    sizes = [cost.checkpoint_bytes for cost in costs if cost.checkpoint_bytes is not None]
    promotion, is_left = ahead.promotion, ahead.forecast.whole_trials > 0
    num_paused = promotion.most_paused(ahead.num_planned) if promotion is not None and is_left else 0
    num_starts = ahead.forecast.stages[0].num_trials
    late = 0.0
    if promotion is not None:
        new = sum(
            stage.whole_trials
            for stage in stages_left(promotion, [Rung()] * len(promotion.rungs), num_starts)
        )
        late = max(0.0, most_whole_trials(promotion, num_starts) - new)
    rungs = ", ".join(map(format_percent, promotion.used)) if promotion is not None else ""
    pauses = f", pauses trials at {rungs} of their training" if rungs else ""
    return Plan(
        costs,
        [*ahead.forecast.stages],
        ahead.forecast.whole_trials,
        (spent + ahead.seconds) / 3600,
        spent / 3600,
        num_workers,
        config.budget.hours if config.budget else None,
        f"{config.pruner.name}{pauses}; {why_pruner}",
        num_paused * max(sizes) if sizes and num_paused else None,
        most_whole_trials=ahead.forecast.whole_trials + late,
    )


def _empty_record(config: StudyConfig) -> StudyRecord:
    counts = {"open": config.num_trials, "running": 0, "done": 0}
    return StudyRecord(config.name, (), config.directions, {}, [], [], counts)


def costs_of(record: StudyRecord) -> dict[str, TrialCost]:
    by_precision: dict[str, list[TrialRecord]] = {}
    for trial in complete_trials(record):
        if not trial.telemetry.get("device", {}).get("shared"):
            by_precision.setdefault(trial.telemetry["precision"]["effective"], []).append(trial)
    costs = {}
    for name, trials in by_precision.items():
        speeds = [trial.attributes.get("train_examples_per_second") or 0.0 for trial in trials]
        seconds = sorted(map(whole_seconds, trials))
        differing = ", ".join(differing_formats(trials, record.definition))
        costs[name] = TrialCost(
            name,
            median(speeds) or None,
            median(seconds),
            plural(len(trials), "complete trial") + (f", different in {differing}" if differing else ""),
            spread_seconds=(seconds[0], seconds[-1]) if len(seconds) > 1 else None,
            checkpoint_bytes=max(trial.telemetry.get("checkpoint_bytes") or 0 for trial in trials) or None,
        )
    return costs


def whole_seconds(trial: TrialRecord) -> float:
    # The setup includes the compilation before the first step.
    parts = ("setup_seconds", "late_compile_seconds", "train_seconds", "evaluation_seconds")
    return sum({**trial.telemetry, **trial.attributes}.get(part) or 0.0 for part in parts)


def measure_cost(
    resolved: ResolvedStudy,
    runs_dir: Path,
    precision: str,
) -> TrialCost:
    """Train some steps with the settings in the middle of their ranges, and evaluate once. Raises
    RunError.
    """
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
    result = executor.run(params, None, "plan", Callbacks())
    release_free_memory(resolved.device)  # the trials may run in other processes
    if result.outcome != Outcome.COMPLETE:
        raise RunError(f"{precision}: {MEASURED_STEPS} steps ended as {result.outcome}: {result.reason}")
    measured = {**result.telemetry, **result.headline}
    trial = build_trial_config(config, middle(config.search_space) | params, precision)
    split = executor.loader.tokens("train", trial)
    windows = split.num_windows
    args, rate = training_args(config, trial, windows), measured["train_examples_per_second"]
    if rate is None:
        raise RunError(f"{precision}: each of {MEASURED_STEPS} steps compiled something: no speed is known.")
    # A batch is of windows, of which an example may have several.
    num_examples = (args.budget.max_steps or 0) * args.batch_size * len(split.examples) / windows
    seconds = args.budget.max_seconds or num_examples / rate
    seconds += len(args.evaluate_at) * measured["evaluation_seconds"] + measured["setup_seconds"]
    run_seconds = measured["setup_seconds"] + measured["evaluation_seconds"]
    measured_by = f"{MEASURED_STEPS} steps"
    size = measured.get("checkpoint_bytes")
    return TrialCost(precision, rate, seconds, measured_by, run_seconds, checkpoint_bytes=size)


class Limit(NamedTuple):
    """Largest hidden loss of a comparison, as a sentence."""

    text: str
    can_be_as_good: bool = True


def comparison_limit(
    config: StudyConfig, data: DataSet, margin: float, plan: ComparisonConfig | None = None
) -> Limit:
    """State the losses that the labels of a comparison's split, or the runs of its plan, cannot exclude."""
    is_test = "test" in data.splits and not unlabelled_test_tasks(config, data)
    split = "test" if is_test else "validation"
    question = Question(quality_objective(config.objective).metric, margin, rows=f"rows of {split}")
    facts = label_facts(data.tasks, data.splits[split], question)
    if facts is None:
        text = f"{question.metric} has no value for right predictions of {split}, so no loss can be excluded."
        return Limit(text, can_be_as_good=False)
    text = facts.limit(question)
    if math.isinf(margin):
        return Limit(text)
    if facts.excludable >= margin:
        more = "" if math.isinf(facts.row_bound) else f" Label more {question.rows} to change that."
        return Limit(
            f"{text} So no precision can be shown to be as good as fp32.{more}", can_be_as_good=False
        )
    num_runs = plan.max_seeds * len(plan.configurations) if plan else MOST_RUNS
    text += f" `As good` needs at least {runs_needed()} runs; this comparison has at most {num_runs}."
    return Limit(text, num_runs >= runs_needed())


def default_comparison_limit(config: StudyConfig, data: DataSet | None) -> str:
    """State the losses that `hpo compare` cannot exclude with its default margin; empty if unknown."""
    if is_error(quality_objective(config.objective).metric):
        return ""
    try:
        data = data or load_data(config.data)
    except DataError as error:
        _logger.warning("The losses that `hpo compare` cannot exclude are unknown here: %s", error)
        return ""
    return comparison_limit(config, data, DEFAULTS["margin"]).text


def comparison_cost(search: StudyRecord, plan: ComparisonConfig) -> str:
    """State the largest number of trials and their time, by the complete trials of the search."""
    num = len(plan.arms()) * plan.max_seeds
    seconds = fmean(whole_seconds(trial) for trial in complete_trials(search))
    return f"At most {num} trials, about {format_seconds(num * seconds)} on one worker."
