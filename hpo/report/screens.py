"""The text and tables that a terminal shows of a study, a trial or a check of precisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import sleep
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hpo.report.formats import (
    describe_params,
    format_metric,
    format_number,
    format_seconds,
    how_to_resume,
    objective_values,
    precision_facts,
    score_explained,
    trials_done,
)
from hpo.report.limits import best_or_nearest, limits_told
from hpo.report.spending import spending_told
from hpo.report.status import paused_told, study_status
from hpo.report.terminal import OUTCOME_STYLES, one_line, warning
from hpo.study.reading.study_record import (
    best_trials,
    complete_trials,
    is_over,
    limit_counts,
    lost_weights,
    unverified_precisions,
)

if TYPE_CHECKING:
    from hpo.report.detailed import Detailed
    from hpo.report.terminal import Part
    from hpo.study.reading.overview import StudyOverview
    from hpo.study.reading.study_record import StudyRecord, TrialRecord
    from hpo.training.evaluate import Evaluation
    from hpo.trial.compat import Compatibility
    from hpo.trial.telemetry import TrialResult
    from hpo.trial.verify import PrecisionCheck


def summary(record: StudyRecord) -> Iterator[Part]:
    """The table by precision, the best configuration, and where to look next."""
    from hpo.report.tables import StudyTables, brief_summary

    if any(trial.ended for trial in record.trials):
        tables = StudyTables(record)
        yield f"{record.name}: by requested precision", brief_summary(tables)
        yield from filter(None, [tables.formats.text()])
    yield from best(record)
    for said in (*lost_weights(record), *unverified_precisions(record)):
        yield warning(" ".join(said))
    if complete_trials(record):
        hints = "   ".join(f"hpo {command} {record.name}" for command in ("report", "dashboard", "best"))
        yield Text(f"More about it: {hints}", style="dim")


def best(record: StudyRecord) -> Iterator[Part]:
    """The best trial (with several objectives, the Pareto front): values, parameters, precision facts, and
    the objectives with their intervals on each split of a detailed evaluation."""
    from hpo.report.detailed import evaluations_of, headline

    trials = best_trials(record)
    if not trials:
        none = f"None of the {len(record.trials)} trials is" if record.trials else "No trial is"
        yield f"{none} complete yet."
    for trial in trials:
        values = ", ".join(map(" ".join, objective_values(record, trial).items()))
        named = (f"{best_or_nearest(trial)} ", "bold")
        yield Text.assemble(named, f"trial {trial.number}: ", (values, "bold green"))
        facts = (describe_params(trial.params, in_full=True), precision_facts(trial))
        for line in (*facts, *(headline(one, record.metric_names) for one in evaluations_of(trial))):
            yield f"     {line}"
    if trials and (explained := score_explained(record.metric_names, record.definition)):
        yield explained
    yield from limits_told(record)
    yield from spending_told(record)
    for question, result in record.comparisons.items():
        going = "" if result["has_ended"] else " (so far)"
        yield f"Comparison of {question} on new seeds{going}: {result['recommendation']}"


def best_model(record: StudyRecord, evaluated: str | None, exported: str | None) -> Iterator[Part]:
    """The best trials, the metrics of the first on validation and on `evaluated`, and warnings."""
    from hpo.report.detailed import evaluations_of

    yield from best(record)
    if trials := best_trials(record):
        evaluations = evaluations_of(trials[0])
        if "validation" not in trials[0].detailed:
            yield from metrics(trials[0])
        if evaluations:
            yield from detailed(next((one for one in evaluations if one.split == evaluated), evaluations[0]))
    yield from map(warning, warnings(record))
    if exported:
        yield f"Trial {trials[0].number} is exported to {exported}."


def best_as_json(record: StudyRecord) -> dict[str, Any]:
    """The best trials, for `hpo best --json`."""
    return {
        "study": record.name,
        "trials": [
            {
                "number": trial.number,
                "values": dict(zip(record.metric_names, trial.values or (), strict=True)),
                "params": trial.params,
                "precision": trial.telemetry.get("precision"),
                "metrics": trial.telemetry.get("metrics"),
                "source_metrics": trial.telemetry.get("source_metrics") or {},
                "baseline": trial.telemetry.get("baseline"),
                "detailed": trial.detailed,
            }
            for trial in best_trials(record)
        ],
        "limits": limit_counts(record),
        "comparisons": record.comparisons,
        "warnings": warnings(record),
    }


def warnings(record: StudyRecord) -> list[str]:
    """The facts that a user of the study's models must know."""
    from hpo.report.limits import no_better_than_constant
    from hpo.report.verdicts import chosen_on_test

    lost = map(" ".join, lost_weights(record))
    return [*no_better_than_constant(record), *chosen_on_test(record), *lost]


def metrics(trial: TrialRecord) -> Iterator[Part]:
    """The metrics of a trial on validation, as the search measured them."""
    from hpo.report.tables import source_metrics_text, task_metrics_text

    if trial.telemetry.get("metrics"):
        yield Text(f"Trial {trial.number} on validation, as the search measured it", style="bold")
        yield "", task_metrics_text(trial.telemetry)
        yield "tasks that several sources have", source_metrics_text(trial.telemetry)


def detailed(one: Detailed) -> Iterator[Part]:
    """The metrics of a detailed evaluation with intervals and warnings; the page has the rest."""
    from hpo.report.detailed import decided_text, num_rows
    from hpo.report.detailed_tables import metrics_text

    said = f"Trial {one.trial_number} on {one.split}: {num_rows(one)}"
    yield Text("; ".join(filter(None, (said, decided_text(one)))), style="bold")
    yield "", metrics_text(one).map(one_line)
    yield from map(warning, one.warnings)


def trial_record(metrics: Sequence[str], params: Mapping[str, Any], result: TrialResult) -> dict[str, Any]:
    """The record that a study would store of a trial."""
    from hpo.study.claims.lease import trial_attributes

    values = None if result.values is None else dict(zip(metrics, result.values, strict=True))
    return {"params": params, "values": values, **trial_attributes(result)}


def trial(record: Mapping[str, Any]) -> Iterator[Part]:
    """The record of the trial of `hpo train`."""
    from hpo.report.tables import task_metrics_text

    if record["telemetry"].get("metrics"):
        yield "Best evaluation", task_metrics_text(record["telemetry"])
    reason = f": {record['outcome_reason']}" if record["outcome_reason"] else ""
    yield Text.assemble((record["outcome"], OUTCOME_STYLES.get(record["outcome"], "")), reason)
    facts = [item for item in record.items() if item[0].startswith(("fp_precision", "train_", "peak_"))]
    for key, value in [*(record["values"] or {}).items(), *facts]:
        yield f"{key}: {value if isinstance(value, str) else format_metric(key, value)}"


def evaluation(metrics: Sequence[str], found: Evaluation) -> str:
    """A line for an evaluation during the trial of `hpo train`."""
    pairs = zip(metrics, found.values, strict=True)
    values = "  ".join(f"{name} {value:.4g}" for name, value in pairs)
    used = f"{found.budget_used:4.0%}  {found.seconds:.1f} s"
    loss = "" if math.isnan(found.train_loss) else f"  loss {found.train_loss:.4g}"
    return f"step {found.step}  {used}{loss}  {values}"


def overview(studies: Sequence[StudyOverview]) -> Iterator[Part]:
    """The studies of a database."""
    if not studies:
        yield "The database holds no study."
    yield (
        "",
        [
            {
                "study": study.name,
                "state": {"open": "unfinished", "done": "finished"}.get(study.state, study.state),
                "trials ended": f"{study.trials['done']} of {study.trials['total']}",
                "workers": str(study.workers),
                "age": format_seconds(study.now - study.created),
            }
            for study in studies
        ],
    )


def watched(read: Callable[[], StudyRecord], seconds: float) -> Iterator[tuple[object, Iterator[Part]]]:
    """Read a study every so many seconds until it is over: what is new in it, and its status."""
    while True:
        record = read()
        numbers = study_status(record)
        yield [numbers[name] for name in ("state", "trials", "outcomes", "best")], status(record, numbers)
        if is_over(record):
            return
        sleep(seconds)


def status(record: StudyRecord, numbers: Mapping[str, Any]) -> Iterator[Part]:
    """Trials by outcome, live workers, rate and estimated end, and the best so far."""
    done, paused, total = numbers["trials"]["done"], numbers["trials"].get("paused", 0), numbers["n_trials"]
    in_hand = {worker["trial"] for worker in numbers["workers"]} - {None}
    counts = trials_done(numbers["trials"], has_budget=bool(numbers["budget"]))
    if not is_over(record):
        counts += f", {len(in_hand)} running"
        counts += "" if numbers["budget"] else f", {total - done - len(in_hand) - paused} not started"
    yield Text.assemble((record.name, "bold"), f": {counts}")
    if record.state != "open":
        yield f"The study is {record.state}. {how_to_resume(record.name)}"
    yield "", [{"outcome": outcome, "trials": count} for outcome, count in numbers["outcomes"].items()]
    yield "", [_worker(one) for one in numbers["workers"]]
    stranded = [trial for trial in record.trials if trial.outcome == "preempted" and trial.ended is None]
    if told := paused_told(record):
        yield told
    if stranded:
        was = "1 trial was" if len(stranded) == 1 else f"{len(stranded)} trials were"
        yield f"{was} interrupted. The next worker continues there."
    if not numbers["workers"] and record.state == "open" and not is_over(record):
        yield f"No worker is running. To start one: hpo worker {record.name}"
    if record.num_foreign:
        run = f" Still RUNNING: {record.num_foreign_running}. `hpo doctor --fix` ends these."
        told = f"Trials that hpo did not make: {record.num_foreign}. They count for nothing in this study."
        yield told + (run if record.num_foreign_running else "")
    if numbers["trials_per_hour"]:
        yield f"Rate: {format_number(numbers['trials_per_hour'])} trials an hour."
    if numbers["estimated_end"]:
        yield f"Estimated end: {numbers['estimated_end']}."
    yield from best(record)
    yield from map(warning, numbers["warnings"])


def _worker(worker: Mapping[str, Any]) -> dict[str, str]:
    facts = {name: worker[name] for name in ("host", "device", "job", "trial")}
    cells = {name: "" if value is None else str(value) for name, value in facts.items()}
    last_seen = f"{format_seconds(worker['silent_seconds'])} ago"
    return {"live worker": str(worker["number"]), **cells, "last seen": last_seen}


def verification(checks: Sequence[PrecisionCheck], device: str, advice: str) -> Iterator[Part]:
    """The precisions on this machine."""
    yield Text(device, style="bold")
    yield "", [_check(check) for check in checks]
    yield Text(
        "Speed and memory against fp32: forward and backward of a micro-batch, the fastest of the repeats.",
        style="dim",
    )
    yield from (f"{check.name}: {check.note}" for check in checks if check.note)
    yield Text(advice, style="bold")


def _check(check: PrecisionCheck) -> dict[str, str]:
    found = check.compatibility
    facts = {
        "precision": check.name,
        "support": check.support.level,
        "verdict": found.verdict if found else "",
    }
    return facts | _measured(found)


def _measured(check: Compatibility | None) -> dict[str, str]:
    """The largest error of logits, the cosine of gradients, the speed, the memory."""
    names = ("logits\nerror", "gradient\ncosine", "speed", "memory")
    if check is None:
        return dict.fromkeys(names, "")
    measured, costs = check.measurement, check.costs
    error = max(measured.logits_relative_error.values(), default=None)
    cells = (
        "" if error is None else f"{error:.1e}",
        "" if measured.gradient_cosine is None else f"{measured.gradient_cosine:.4f}",
        "" if costs is None else f"{costs.speed_ratio:.2f}x",
        "" if costs is None or costs.memory_ratio is None else f"{costs.memory_ratio:.2f}x",
    )
    return dict(zip(names, cells, strict=True))
