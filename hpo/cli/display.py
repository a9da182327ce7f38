"""The tables a person sees in the terminal. Everything here draws what others computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hpo.cli.progress import OUTCOME_STYLES
from hpo.json_safe import json_safe
from hpo.report.compared import configuration_table, precision_table
from hpo.report.deployed import (
    latency_table,
    loading,
    quality_table,
    sentences,
    task_table,
    threads,
    verdict,
)
from hpo.report.detailed_tables import evaluations_of, headline
from hpo.report.formats import (
    describe_params,
    format_interval,
    format_metric,
    format_number,
    format_seconds,
    objective_values,
    precision_facts,
)
from hpo.report.tables import StudyTables, brief_summary, precision_comparison
from hpo.study.study_record import best_trials, complete_trials

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from hpo.compare.answers import Answer, Answers
    from hpo.compare.estimate import Ratio
    from hpo.compare.race import Race
    from hpo.compare.results import Result
    from hpo.config.comparison import ComparisonConfig
    from hpo.study.study_record import StudyRecord
    from hpo.trial.measure import Measurement
    from hpo.trial.verify import PrecisionCheck


def print_summary(record: StudyRecord) -> None:
    """The table by precision, the best configuration, and where to look next."""
    console = Console()
    if any(trial.ended for trial in record.trials):
        console.print(_precision_table(record, console))
    print_best(record)
    if complete_trials(record):
        name = escape(record.name)
        hints = (f"hpo report {name}", f"hpo dashboard {name}", f"hpo best {name}")
        console.print(f"[dim]{'   '.join(hints)}[/dim]", soft_wrap=True)


def _precision_table(record: StudyRecord, console: Console) -> Table:
    """A column per precision; where these do not fit the terminal, or there are several kinds of device, a
    row per precision (and device) with less in it."""
    title = f"{record.name}: by requested precision"
    tables = StudyTables(record)
    table = dataframe_table(precision_comparison(tables), title)
    fits = console.measure(table, options=console.options.update(width=1000)).maximum <= console.width
    if fits and len(tables.devices) < 2:  # of several kinds of device, it has no speed
        return table
    brief = brief_summary(tables)
    brief["outcomes"] = brief["outcomes"].str.replace(", ", ",\n")
    table = dataframe_table(brief.rename(columns=lambda name: name.replace(" ", "\n")), title)
    for column in table.columns:
        column.no_wrap = column.header not in ("outcomes", "device")
        column.min_width = 12 if column.header == "outcomes" else None
    return table


def print_best(record: StudyRecord) -> None:
    """The best trial (with several objectives, the Pareto front): values, parameters, precision facts, and
    the score with its interval on each split that it was evaluated on in detail."""
    console = Console(highlight=False)
    best = best_trials(record)
    if not best:
        console.print(f"No complete trial{f' of {len(record.trials)}' if record.trials else ' yet'}.")
    for trial in best:
        values = ", ".join(map(" ".join, objective_values(record, trial).items()))
        console.print(Text.assemble(("best ", "bold"), f"trial {trial.number}: ", (values, "bold green")))
        for line in (describe_params(trial.params, in_full=True), precision_facts(trial)):
            print_indented(console, Text(line), 5)
        for one in evaluations_of(trial):
            print_indented(console, Text(headline(one)), 5)
    for question, found in record.comparisons.items():
        going = "" if found["has_ended"] else " (so far)"
        console.print(
            Text(f"{question} compared on new seeds{going}: {found['recommendation']}"), soft_wrap=True
        )


def print_indented(console: Console, text: Text, indent: int) -> None:
    """A paragraph that is indented as a whole in a terminal; in a file it is one line."""
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent).append_text(text), soft_wrap=True)


def print_metrics(metrics: Mapping[str, Mapping[str, float]], title: str) -> None:
    """{task: {metric: value}} as a table."""
    table = _table("task", "metric", "value", title=title)
    for task, values in metrics.items():
        for metric, value in values.items():
            table.add_row(escape(task), metric, format_metric(metric, value))
    Console().print(table)


def print_trial(record: Mapping[str, Any]) -> None:
    """What `hpo train` shows of the record of one trial."""
    console = Console(highlight=False)
    if metrics := record["telemetry"].get("metrics"):
        print_metrics(metrics, "Best evaluation")
    reason = f": {record['outcome_reason']}" if record["outcome_reason"] else ""
    console.print(Text.assemble(_styled(record["outcome"]), reason))
    headline = [item for item in record.items() if item[0].startswith(("fp_precision", "train_", "peak_"))]
    for key, value in [*(record["values"] or {}).items(), *headline]:
        text = value if isinstance(value, str) else format_metric(key, value)
        console.print(f"{key}: {text}", markup=False)


def print_status(record: StudyRecord, status: Mapping[str, Any]) -> None:
    """Trials by outcome, live workers, rate and estimated end, and the best so far."""
    console = Console(highlight=False)
    done, total = status["trials"]["done"], status["n_trials"]
    in_hand = {worker["trial"] for worker in status["workers"]} - {None}
    console.print(
        f"[bold]{escape(record.name)}[/bold]: {done} of {total} trials done, "
        f"{len(in_hand)} running, {total - done - len(in_hand)} to come"
    )
    if record.state != "open":
        console.print(f"It is {record.state}; `hpo resume {record.name}` opens it again.", markup=False)
    if status["outcomes"]:
        counts = _table("outcome", "trials")
        for outcome, count in status["outcomes"].items():
            counts.add_row(_styled(outcome), str(count))
        console.print(counts)
        states = (f"{count} {state}" for state, count in status["states"].items())
        console.print(f"In Optuna: {', '.join(states)}.", style="dim")
    for table in (_jobs_table(status.get("jobs", ())), _workers_table(status["workers"])):
        if table.row_count:
            console.print(table)
    stranded = [trial for trial in record.trials if trial.state == "RUNNING" and trial.number not in in_hand]
    if stranded:
        console.print(f"Unfinished, with no worker: {len(stranded)}. The next worker goes on with them.")
    elif not status["workers"]:
        console.print("No live worker.")
    if status["trials_per_hour"]:
        console.print(f"Rate: {format_number(status['trials_per_hour'])} trials an hour.")
    if status["estimated_end"]:
        console.print(f"Estimated end: {status['estimated_end']}.")
    print_best(record)


def _jobs_table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("job", "state", "workers", "submitted on", "at")
    for job in jobs:
        states = ", ".join(f"{count} {state}" for state, count in job["states"].items())
        reason = f" ({job['reason']})" if job["reason"] else ""
        table.add_row(job["id"], states + reason, str(job["num_workers"]), job["host"], job["created"])
    return table


def _workers_table(workers: Sequence[Mapping[str, Any]]) -> Table:
    columns = {name: any(worker[name] is not None for worker in workers) for name in ("device", "job")}
    shown = [name for name, is_known in columns.items() if is_known]
    table = _table("live worker", "host", *shown, "trial", "last seen")
    for worker in workers:
        cells = ("" if worker[name] is None else str(worker[name]) for name in ("host", *shown, "trial"))
        table.add_row(
            str(worker["number"]), *map(escape, cells), f"{format_seconds(worker['silent_seconds'])} ago"
        )
    return table


def print_verification(checks: Sequence[PrecisionCheck], device: str, advice: str) -> None:
    """What this machine does with each precision."""
    console = Console(highlight=False)
    console.print(Text(device, style="bold"))
    table = _table("precision", "support", "verdict", "logits\nerror", "gradient\ncosine", "speed", "memory")
    notes = Table.grid(padding=(0, 2))
    notes.add_column(no_wrap=True)
    for check in checks:
        style = {"native": "green", "emulated": "yellow"}.get(check.support.level, "red")
        found = check.compatibility
        cells = [found.verdict, *_measured(found.measurement)] if found else []
        table.add_row(check.name, Text(check.support.level, style=style), *cells)
        if check.note:
            notes.add_row(check.name, escape(check.note))
    console.print(table)
    console.print(
        "Speed and memory against fp32, forward and backward of the check's batch. In brackets the range "
        "over the repeats, timed in turn: where it holds 1.00, no difference shows.",
        style="dim",
    )
    if notes.row_count:
        console.print(notes)
    console.print(Text(advice, style="bold"))


def _measured(found: Measurement) -> list[str]:
    """The largest error of logits, the cosine of gradients, the speed with its noise, the memory."""
    error = max(found.logits_relative_error.values(), default=None)
    low, high = found.speed_ratio_low, found.speed_ratio_high
    noise = "" if low is None or high is None else f"\n({low:.2f}-{high:.2f})"
    return [
        "" if error is None else f"{error:.1e}",
        "" if found.gradient_cosine is None else f"{found.gradient_cosine:.4f}",
        "" if found.speed_ratio is None else f"{found.speed_ratio:.2f}x{noise}",
        "" if found.memory_ratio is None else f"{found.memory_ratio:.2f}x",
    ]


def _styled(outcome: str) -> Text:
    return Text(outcome, style=OUTCOME_STYLES.get(outcome, ""))


def _table(*columns: str, title: str | None = None) -> Table:
    title = None if title is None else escape(title)
    return Table(
        *map(escape, columns), title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


_NAME_WIDTH = 16


def dataframe_table(frame: pd.DataFrame, title: str | None = None) -> Table:
    """A table of text cells; columns whose cells are all empty are left out."""
    shown = [column for column in frame.columns if any(str(cell) for cell in frame[column])]
    table = _table(*shown, title=title)
    words = [max(map(len, str(column).split()), default=0) for column in shown]
    if shown:  # the first says what a row is about
        names = frame[shown[0]].astype(str).str.len()
        words[0] = max([words[0], *names[names <= _NAME_WIDTH]])
    fits = sum(words) + 2 * len(words) + 1 <= Console().width  # with the gaps and the edges
    for column, longest in zip(table.columns, words, strict=True):
        column.overflow = "fold"  # a number that is cut is another number
        column.min_width = longest if fits else None
    for row in frame[shown].itertuples(index=False):
        table.add_row(*(escape(str(cell)) for cell in row))
    return table


def print_comparison(found: Result[Any]) -> None:
    """What `hpo compare` has found, and the recommendation."""
    from hpo.compare.race import Race

    if isinstance(found.found, Race):
        _print_race(found.found, found.plan)
    else:
        _print_verdicts(found.found, found.plan)
    stored = json_safe(found.as_json())
    costs, compared = precision_table(stored), configuration_table(stored)
    if not costs.empty:
        title = "speed and memory over fp32's; medians of numeric telemetry"
        Console().print(dataframe_table(costs, title))
    Console().print(dataframe_table(compared, "configurations that were compared"))
    Console(highlight=False).print(found.recommendation, markup=False, soft_wrap=True)


def _print_verdicts(answers: Answers, plan: ComparisonConfig) -> None:
    """The verdicts by metric, and what fp32 does against itself."""
    from hpo.trial.objectives import unit_of

    console = Console(highlight=False)
    num = len(plan.configurations)
    console.print(
        f"{plan.study}: {num} configuration{'s' * (num > 1)}, against fp32, margin {plan.margin:g} "
        f"{unit_of(answers.objective)}; higher is better",
        style="bold",
    )
    for metric in dict.fromkeys(row.metric for row in answers.rows):
        columns = ("precision", "question", "difference", "verdict", "seeds", "would decide")
        table = _table(*columns, title=escape(metric))
        for row in answers.rows:
            if row.metric == metric:
                table.add_row(*_comparison_cells(row))
        console.print(table)
    deciding = [row for row in answers.rows if row.metric == answers.objective]
    of_devices = ("device", "difference there") if len(answers.devices) > 1 else ()
    there = _table("precision", "question", *of_devices, "speed", "memory", title="times fp32's")
    for row in deciding:
        for found in row.devices:
            points = format_interval(found.difference, found.low, found.high, "+")
            of_device = (escape(found.device), points) if of_devices else ()
            there.add_row(row.precision, row.question, *of_device, _ratio(found.speed), _ratio(found.memory))
    if of_devices or any(row.question == "tuned" for row in deciding):
        console.print(there)
    for row in deciding:
        if row.not_pooled:
            console.print(f"{row.precision}, {row.question}: {row.not_pooled}.", markup=False, soft_wrap=True)


def _print_race(race: Race, plan: ComparisonConfig) -> None:
    """The standings of `--configurations`."""
    title = f"{plan.study}: its best configurations on new seeds, in points"
    table = _table("trial", "mean", "seeds", "probability best", "overstated by the search", title=title)
    for standing in race.standings:
        out = "" if standing.dropped_after is None else ", beaten"
        table.add_row(
            str(standing.configuration),
            f"{standing.mean:.2f}",
            f"{standing.num_seeds}{out}" + (f", {standing.num_failed} failed" if standing.num_failed else ""),
            f"{standing.probability_best:.2f}",
            f"{standing.overstated:+.2f} [{standing.overstated_low:+.2f}, {standing.overstated_high:+.2f}]",
        )
    Console(highlight=False).print(table)


def _comparison_cells(row: Answer) -> list[str]:
    found = row.verdict
    verdict = "noise floor" if row.is_noise_floor else found.verdict.replace("_", " ")
    if found.num_failed:
        verdict += f", {found.num_failed} failed"
    needed = None if row.is_noise_floor else found.seeds_needed
    return [
        row.precision,
        "other seeds" if row.is_noise_floor else row.question,
        format_interval(found.difference, found.low, found.high, "+"),
        verdict,
        str(found.num_seeds),
        "–" if needed is None else str(needed),
    ]


def print_deployment(found: Mapping[str, Any], folder: Path) -> None:
    """What `hpo deploy` has found, and how to use it."""
    console = Console(highlight=False)
    title = f"{found['study']}: {found['objective']} on {found['num_examples']:,} rows of {found['split']}"
    console.print(dataframe_table(quality_table(found), title))
    lost = f"{found['unit']} lost of the same model's fp32, with the 95 % interval"
    console.print(f"Drop: {lost}. Change: the largest of any probability.", style="dim")
    title = f"{threads(found)}: ms from texts to predictions, median / 99th percentile; times fp32's speed"
    console.print(dataframe_table(latency_table(found), title))
    tasks = task_table(found)
    if not tasks.empty and tasks["task"].nunique() > 1:
        console.print(dataframe_table(tasks, "by task: the primary metric; drops in points"))
    for sentence in sentences(found):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print(verdict(found), style="bold", markup=False, soft_wrap=True)
    told = f"To use it: {loading(found, f'{folder}/model')}. More: {folder}/deploy.html"
    console.print(told, markup=False, soft_wrap=True)


def _ratio(ratio: Ratio | None) -> str:
    return "–" if ratio is None else format_interval(ratio.ratio, ratio.low, ratio.high)
