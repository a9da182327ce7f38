"""The tables a person sees in the terminal. Everything here draws what others computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hpo.api.progress import OUTCOME_STYLES
from hpo.errors import printable
from hpo.report.deployed import latency_table, loading, quality_table, sentences, task_table, threads, verdict
from hpo.report.detailed_tables import (
    Detailed,
    decided_text,
    evaluations_of,
    headline,
    metrics_text,
    num_rows,
)
from hpo.report.formats import (
    describe_params,
    format_metric,
    format_number,
    format_seconds,
    objective_values,
    precision_facts,
    trials_done,
)
from hpo.report.limits import best_or_nearest, limits_told
from hpo.report.spending import spending_told
from hpo.report.tables import StudyTables, brief_summary, task_metrics_text
from hpo.report.verdicts import comparison_tables, details
from hpo.study.reading.study_record import (
    best_trials,
    complete_trials,
    lost_weights,
    unverified_precisions,
)

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.study.reading.study_record import StudyRecord, TrialRecord
    from hpo.trial.compat import Compatibility
    from hpo.trial.verify import PrecisionCheck


def print_summary(record: StudyRecord) -> None:
    """The table by precision, the best configuration, and where to look next."""
    console = Console()
    if any(trial.ended for trial in record.trials):
        title = f"{record.name}: by requested precision"
        console.print(dataframe_table(brief_summary(StudyTables(record)), title))
    print_best(record)
    for said in (*lost_weights(record), *unverified_precisions(record)):
        print_warning(" ".join(said))
    if complete_trials(record):
        name = escape(record.name)
        hints = (f"hpo report {name}", f"hpo dashboard {name}", f"hpo best {name}")
        console.print(f"[dim]{'   '.join(hints)}[/dim]", soft_wrap=True)


def print_best(record: StudyRecord) -> None:
    """The best trial (with several objectives, the Pareto front): values, parameters, precision facts, and
    the score with its interval on each split that it was evaluated on in detail."""
    console = Console(highlight=False)
    best = best_trials(record)
    if not best:
        console.print(f"No complete trial{f' of {len(record.trials)}' if record.trials else ' yet'}.")
    for trial in best:
        values = ", ".join(map(" ".join, objective_values(record, trial).items()))
        named = (f"{best_or_nearest(trial)} ", "bold")
        console.print(Text.assemble(named, f"trial {trial.number}: ", (values, "bold green")))
        for line in (describe_params(trial.params, in_full=True), precision_facts(trial)):
            print_indented(console, Text(line), 5)
        for one in evaluations_of(trial):
            print_indented(console, Text(headline(one)), 5)
    for told in limits_told(record) + spending_told(record):
        print_indented(console, Text(told), 0)
    for question, result in record.comparisons.items():
        going = "" if result["has_ended"] else " (so far)"
        console.print(
            Text(f"{question} compared on new seeds{going}: {result['recommendation']}"), soft_wrap=True
        )


def print_metrics(trial: TrialRecord) -> None:
    """The metrics of a trial on validation, as the search measured them."""
    if trial.telemetry.get("metrics"):
        console = Console(highlight=False)
        console.print(Text(f"Trial {trial.number} on validation, as the search measured it", style="bold"))
        console.print(dataframe_table(task_metrics_text(trial.telemetry)))


def print_detailed(one: Detailed) -> None:
    """The metrics of a detailed evaluation with intervals and warnings; the page has the rest."""
    console = Console(highlight=False)
    said = f"Trial {one.trial_number} on {one.split}: {num_rows(one)}"
    print_indented(console, Text("; ".join(filter(None, (said, decided_text(one)))), style="bold"), 0)
    console.print(dataframe_table(metrics_text(one).map(one_line)))
    for text in one.warnings:
        print_warning(text)


def print_indented(console: Console, text: Text, indent: int) -> None:
    """A paragraph that is indented as a whole in a terminal; in a file it is one line."""
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent).append_text(text), soft_wrap=True)


def print_warning(text: str) -> None:
    """A sentence that a reader of the figures must know."""
    print_indented(Console(highlight=False), Text.assemble(("Warning: ", "bold yellow"), one_line(text)), 0)


def one_line(text: str) -> str:
    """The text in one line, without characters that a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)


def print_trial(record: Mapping[str, Any]) -> None:
    """What `hpo train` shows of the record of one trial."""
    console = Console(highlight=False)
    if record["telemetry"].get("metrics"):
        console.print(dataframe_table(task_metrics_text(record["telemetry"]), "Best evaluation"))
    reason = f": {record['outcome_reason']}" if record["outcome_reason"] else ""
    outcome = (record["outcome"], OUTCOME_STYLES.get(record["outcome"], ""))
    console.print(Text.assemble(outcome, reason))
    headline = [item for item in record.items() if item[0].startswith(("fp_precision", "train_", "peak_"))]
    for key, value in [*(record["values"] or {}).items(), *headline]:
        text = value if isinstance(value, str) else format_metric(key, value)
        console.print(f"{key}: {text}", markup=False)


def print_status(record: StudyRecord, status: Mapping[str, Any]) -> None:
    """Trials by outcome, live workers, rate and estimated end, and the best so far."""
    console = Console(highlight=False)
    done, paused, total = status["trials"]["done"], status["trials"].get("paused", 0), status["n_trials"]
    in_hand = {worker["trial"] for worker in status["workers"]} - {None}
    counts = f"{trials_done(status['trials'], has_budget=bool(status['budget']))}, {len(in_hand)} running"
    if status["budget"] is None:
        counts += f", {total - done - len(in_hand) - paused} to come"
    console.print(f"[bold]{escape(record.name)}[/bold]: {counts}")
    if record.state != "open":
        console.print(f"It is {record.state}; `hpo resume {record.name}` opens it again.", markup=False)
    outcomes = pd.DataFrame(status["outcomes"].items(), columns=["outcome", "trials"])
    for table in (outcomes, _workers(status["workers"])):
        if not table.empty:
            console.print(dataframe_table(table))
    stranded = [trial for trial in record.trials if trial.outcome == "preempted" and trial.ended is None]
    if stranded:
        console.print(f"Unfinished, with no worker: {len(stranded)}. The next worker goes on with them.")
    elif not status["workers"]:
        console.print("No live worker.")
    if status["trials_per_hour"]:
        console.print(f"Rate: {format_number(status['trials_per_hour'])} trials an hour.")
    if status["estimated_end"]:
        console.print(f"Estimated end: {status['estimated_end']}.")
    print_best(record)
    for text in status["warnings"]:
        print_warning(text)


def _workers(workers: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "live worker": worker["number"],
            **{
                name: "" if worker[name] is None else worker[name]
                for name in ("host", "device", "job", "trial")
            },
            "last seen": f"{format_seconds(worker['silent_seconds'])} ago",
        }
        for worker in workers
    )


def print_verification(checks: Sequence[PrecisionCheck], device: str, advice: str) -> None:
    """What this machine does with each precision."""
    console = Console(highlight=False)
    console.print(Text(device, style="bold"))
    rows = []
    for check in checks:
        row = {"precision": check.name, "support": check.support.level}
        if check.compatibility is not None:
            row |= {"verdict": check.compatibility.verdict, **_measured(check.compatibility)}
        rows.append(row)
    console.print(dataframe_table(pd.DataFrame(rows).fillna("")))
    console.print(
        "Speed and memory against fp32: forward and backward of a micro-batch, the fastest of the repeats.",
        style="dim",
    )
    for check in checks:
        if check.note:
            print_indented(console, Text(f"{check.name}: {check.note}"), 0)
    console.print(Text(advice, style="bold"))


def _measured(check: Compatibility) -> dict[str, str]:
    """The largest error of logits, the cosine of gradients, the speed, the memory."""
    measured, costs = check.measurement, check.costs
    error = max(measured.logits_relative_error.values(), default=None)
    return {
        "logits\nerror": "" if error is None else f"{error:.1e}",
        "gradient\ncosine": "" if measured.gradient_cosine is None else f"{measured.gradient_cosine:.4f}",
        "speed": "" if costs is None else f"{costs.speed_ratio:.2f}x",
        "memory": "" if costs is None or costs.memory_ratio is None else f"{costs.memory_ratio:.2f}x",
    }


def _table(*columns: str, title: str | None = None) -> Table:
    title = None if title is None else escape(title)
    return Table(
        *map(escape, columns), title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def dataframe_table(frame: pd.DataFrame, title: str | None = None) -> Table:
    """A table of text cells; columns whose cells are all empty are left out.

    Where the words do not fit the terminal, each row is a list of its cells: no word or number is broken.
    """
    shown = [column for column in frame.columns if any(str(cell) for cell in frame[column])]
    frame = frame[shown].astype(str).map(printable)  # before it is measured: a control character has no width
    texts = [[str(column), *frame[column]] for column in frame.columns]
    words = [max(map(cell_len, " ".join(cells).split()), default=0) for cells in texts]
    spare = Console().width - sum(words) - 2 * len(words) - 1  # without the gaps and the edges
    if spare >= 0:
        table = _table(*map(str, frame.columns), title=title)
        for column, longest, cells in zip(table.columns, words, texts, strict=True):
            wanted = max(map(cell_len, "\n".join(cells).splitlines()), default=0)
            column.width = min(wanted, longest + spare)
            spare -= column.width - longest
        for row in frame.itertuples(index=False):
            table.add_row(*map(escape, row))
        return table
    table = _table("", "", title=title)
    table.show_header = False
    table.columns[0].max_width = max(12, Console().width - max(words) - 6)
    table.columns[1].overflow = "fold"  # a number that is cut is another number
    for row in frame.itertuples(index=False):
        for name, cell in zip(frame.columns, row, strict=True):
            if cell:
                table.add_row(escape(" ".join(str(name).split())), escape(cell))
        table.add_section()
    return table


def print_comparison(result: Mapping[str, Any]) -> None:
    """The result of `hpo compare`, and the recommendation."""
    console = Console(highlight=False)
    for table in comparison_tables(result):
        console.print(dataframe_table(table, result["study"]))
    for sentence in details(result):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print(result["recommendation"], style="bold", markup=False, soft_wrap=True)


def print_deployment(stored: Mapping[str, Any], folder: Path) -> None:
    """The result of `hpo deploy`, and how to use it."""
    console = Console(highlight=False)
    title = f"{stored['study']}: {stored['objective']} on {stored['num_examples']:,} rows of validation"
    console.print(dataframe_table(quality_table(stored), title))
    told = f"Drop: {stored['unit']} lost against fp32. As good: its interval is below {stored['max_drop']:g}."
    console.print(told, style="dim")
    title = f"{threads(stored)}: ms from texts to predictions, median / 99th percentile; times fp32's speed"
    console.print(dataframe_table(latency_table(stored), title))
    tasks = task_table(stored)
    if not tasks.empty and tasks["task"].nunique() > 1:
        console.print(dataframe_table(tasks, "by task: the primary metric; drops in points"))
    for sentence in sentences(stored):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print(verdict(stored), style="bold", markup=False, soft_wrap=True)
    told = f"To use it: {loading(stored, f'{folder}/model')}. More: {folder}/deploy.json"
    console.print(told, markup=False, soft_wrap=True)
