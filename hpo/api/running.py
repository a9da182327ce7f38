"""Trials on this machine: in this process, in several, or in the ranks of torchrun."""

import logging
import os
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import typer

from hpo.api.opening import RUNS, TORCHRUN, check_workers, file_given
from hpo.config.study_config import StudyConfig
from hpo.outcome import Progress
from hpo.redaction import redact
from hpo.report.best_screens import summary as summary_of
from hpo.report.progress import StudyDisplay
from hpo.report.status import progress_message, resume_message, study_status, untried_message
from hpo.report.terminal import Shown
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.reading.watch import StudyProgress, StudyWatch, watching
from hpo.study.running.open_study import OpenStudy
from hpo.study.running.stopping import RunSummary
from hpo.study.running.supervisor import WorkerProcesses, share_devices
from hpo.study.store.database import shown_url
from hpo.study.store.lifecycle import has_complete
from hpo.study.store.studies import StudyEntry, read_stored
from hpo.training.distributed import connected_ranks, rank
from hpo.trial.executor import follow


@dataclass(frozen=True, kw_only=True)
class WorkResult(Shown, RunSummary):
    """Result of `hpo worker`: the work of this process and its workers."""

    study: str
    left_out: Mapping[str, str]
    """Precisions of the study that did not run here, with the reason."""
    stored: StudyEntry | None = field(repr=False)
    """The study afterwards; None if it was deleted."""
    has_complete: bool
    """True if the study has a complete trial."""

    @property
    def error(self) -> str:
        """Reason for exit code 1; empty otherwise."""
        if self.exit_code != 1:
            return ""
        ended = sum(self.outcomes.values())
        return f"{self.num_failed} of {ended} trials failed here. `hpo report {self.study}` shows why."

    def as_json(self) -> dict[str, Any]:
        content = {name: getattr(self, name) for name in ("study", "ended", "outcomes", "left_out")}
        return {**content, "outcomes": dict(self.outcomes)}

    def text(self) -> Iterable[Any]:
        return self.how_to_continue() if self.ended in ("elsewhere", "closed", "timeout") else ()

    def how_to_continue(self) -> Iterator[str]:
        """State why it ended before the study, and the command to continue."""
        if self.stored is None:
            yield f"The study {self.study} was deleted."
            return
        counts = progress_message(self.stored.counts, has_budget=bool(self.stored.definition.get("budget")))
        if self.ended == "closed":
            yield f"The study {self.study} is {self.stored.state}: {counts}. {resume_message(self.study)}"
            return
        why = {
            "stopped": "Stopped; running trials have a checkpoint",
            "timeout": "The time limit has passed",
            "elsewhere": f"The remaining trials need a device with {' or '.join(self.elsewhere)}",
        }[self.ended]
        none = "" if self.has_complete or self.ended != "timeout" else ", none of them complete"
        where = " there" if self.ended == "elsewhere" else ""
        command = shlex.join(["hpo", *map(redact, sys.argv[1:])])
        yield f"{why}: {counts}{none}. To continue{where}: {command}"


@dataclass(frozen=True, kw_only=True)
class RunResult(WorkResult):
    """Result of `hpo run`, with the study afterwards."""

    record: StudyRecord = field(repr=False)
    arguments: tuple[str, ...] = ()
    """The study and its database, as they were given, as arguments of a command."""

    @property
    def error(self) -> str:
        if self.ended != "finished" or self.has_complete:
            return super().error
        last = next(trial for trial in reversed(self.record.trials) if trial.state != "WAITING")
        trace = last.attributes.get("traceback")
        return (
            f"the study has ended without a complete trial. The last one ended as {last.outcome}: "
            f"{last.reason}" + (f"\n{trace}" if trace else "")
        )

    def as_json(self) -> dict[str, Any]:
        return study_status(self.record) | {"ended": self.ended, "left_out": self.left_out}

    def text(self) -> Iterator[Any]:
        yield from summary_of(self.record)
        if self.ended != "finished":
            yield from self.how_to_continue()
        yield from filter(None, [untried_message(self.record, *self.arguments)])


def worker_processes(
    config: StudyConfig, storage: str | None, workers: int | None = None, per_device: int | None = None
) -> WorkerProcesses:
    """Return the processes for a study's trials, see `share_devices`."""
    check_workers(workers, per_device)
    return WorkerProcesses(share_devices(config, workers, per_device), storage_as_given=file_given(storage))


@contextmanager
def ranks_of_torchrun() -> Iterator[None]:
    """Connect the processes of torchrun, if it started this one. They train each trial together.

    Rank 0 runs the block. The others follow it to its end and exit.
    """
    if TORCHRUN not in os.environ:
        yield
        return
    with connected_ranks():
        if rank():
            logging.getLogger("hpo").setLevel(logging.ERROR)  # rank 0 reports
            follow(RUNS)
            raise SystemExit
        yield


def run_result(opened: OpenStudy, summary: RunSummary, *arguments: str) -> RunResult:
    """Return the summary of a run with the study afterwards."""
    record = read_study(opened.storage, opened.config.name)
    return RunResult(**_facts(opened, summary), record=record, arguments=arguments)


def work_result(opened: OpenStudy, summary: RunSummary) -> WorkResult:
    """Return the summary of one or more workers with the state of the study afterwards."""
    return WorkResult(**_facts(opened, summary))


def _facts(opened: OpenStudy, summary: RunSummary) -> dict[str, Any]:
    """Return the fields of a `WorkResult`."""
    storage, name = opened.storage, opened.config.name
    complete = storage.read(lambda connection: has_complete(connection, name))
    facts = {"study": name, "left_out": opened.left_out, "has_complete": complete}
    return vars(summary) | facts | {"stored": read_stored(storage, name)}


@contextmanager
def shown(opened: OpenStudy, *, quiet: bool, own: bool = False) -> Iterator[None]:
    """Print the study and its left-out precisions, and show its progress during the block.

    With `own`, show only the trials of this process, and less often: there may be a hundred such workers.
    """
    if quiet:
        yield
        return
    stored, storage, config = opened.stored, opened.storage, opened.config
    done = stored.counts["done"]
    state = "finished" if done == config.n_trials else "resumed" if done or stored.has_trained else "new"
    counts = progress_message(stored.counts, has_budget=config.budget is not None)
    typer.echo(
        f"Study {config.name} ({state}): {counts}, in {shown_url(storage.url)}. "
        f"Sampler {config.sampler.name}, pruner {config.pruner.name}."
    )
    if state == "finished" and config.comparison is None:
        typer.echo(f"To add trials, raise --{'hours' if config.budget else 'n-trials'} of `hpo run`.")
    if opened.left_out:
        reasons = " ".join(dict.fromkeys(opened.left_out.values()))
        typer.echo(
            f"Not run here: {', '.join(opened.left_out)}. {reasons} Workers on other devices may run them; "
            "`amp.on_unsupported` and `amp.allow_emulated` change that."
        )
    read = partial(read_study, storage, config.name)
    display = StudyDisplay(config, read, other_workers=storage.other_workers_on)
    with display.live, watching(StudyWatch(storage, config, own=own).read, display.show, 2.0 if own else 0.5):
        yield


@contextmanager
def trial_shown(config: StudyConfig, *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Show a trial without a study. Yields the function that takes its progress."""
    last, display = deque([Progress(part="check")], 1), StudyDisplay(config)
    reading = watching(lambda: StudyProgress([(None, last[0])]), display.show)
    with nullcontext() if quiet else display.live, nullcontext() if quiet else reading:
        yield last.append
