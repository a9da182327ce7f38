"""The command `diagnose`: where a trial stopped being finite, and what heals it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import (
    RUNS,
    JsonOption,
    StorageOption,
    StudyArgument,
    TrustOption,
    app,
    config_of,
    existing_study,
    make_runs_folder,
    print_json,
    progress_shown,
)
from hpo.errors import InputError
from hpo.outcome import Outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hpo.study.storage import Storage
    from hpo.study.study_record import StudyRecord, TrialRecord
    from hpo.trial.diagnosis import Diagnosis, StoredTrial
    from hpo.trial.executor import Executor


@app.command()
def diagnose(
    study: StudyArgument,
    trial: Annotated[int, typer.Option("--trial", min=0, metavar="N", help="Its number.")],
    storage: StorageOption = None,
    max_steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Steps of the trial that may be made again.")
    ] = 1000,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Name the operator that broke a trial and the settings that heal it; changes nothing in the study.

    A trial that ended well shows the modules farthest from fp32. Exit code 1: nothing broke this time.
    """
    from dataclasses import asdict

    from hpo.device import probe_device
    from hpo.trial.diagnosis import diagnose as find
    from hpo.trial.executor import Executor

    def say(what: str) -> None:
        typer.echo(what, err=True)

    with (
        progress_shown(quiet=as_json),
        existing_study(study, storage) as (database, record),
        tempfile.TemporaryDirectory(prefix="hpo-diagnose-") as temporary,
    ):
        chosen = _trial_of(record, trial)
        config = config_of(study, record, trust_remote_code)
        make_runs_folder(config.name)
        executor = Executor(config, probe_device(config.device), RUNS)
        database.check_data(config.name, executor.dataset.fingerprint)
        found = find(executor, _stored(executor, database, chosen, Path(temporary)), max_steps, say)
    if as_json:
        print_json({"study": record.name, **asdict(found), "healed_by": found.healed_by})
    else:
        print_diagnosis(found)
    raise typer.Exit(0 if found.what or found.farthest else 1)


def _trial_of(record: StudyRecord, number: int) -> TrialRecord:
    chosen = next((trial for trial in record.trials if trial.number == number), None)
    if chosen is None:
        came = f"it has {len(record.trials)}, numbered from 0" if record.trials else "it has none yet"
        raise InputError(f"--trial {number}: there is no such trial of {record.name}; {came}.")
    return chosen


def _stored(executor: Executor, database: Storage, trial: TrialRecord, temporary: Path) -> StoredTrial:
    """What the study has of a trial; checkpoints that lie in an artifact store are brought to `temporary`."""
    from hpo.config.search_space import decode
    from hpo.study.artifact_store import open_artifact_store
    from hpo.study.checkpoint_artifacts import fetch_newest
    from hpo.trial.diagnosis import StoredTrial

    study = executor.study
    token = database.study_token(study.name)
    folder = executor.trial_folder(token, trial.number)
    artifacts = None if folder.is_dir() else open_artifact_store(study.checkpoint)
    if artifacts is not None:
        folder = temporary
        kind = "step" if trial.outcome == Outcome.NONFINITE else "best"
        fetch_newest(kind, artifacts, database, study.name, trial.number, folder)
    return StoredTrial(
        number=trial.number,
        outcome=trial.outcome,
        reason=trial.reason,
        params=decode(study.search_space, trial.params),
        telemetry=trial.telemetry,
        folder=folder,
        resume_key=f"{token}/{trial.number}",
    )


def print_diagnosis(found: Diagnosis) -> None:
    """Print what was found, for a person."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hpo.trial.remedies import shown

    console = Console(highlight=False)
    at = f" at step {found.step}" if found.step else ""
    what = {None: "nothing broke", "raised": "an error was raised", "far": "finite, but far from fp32"}
    console.print(
        f"Trial {found.trial} ({found.outcome}, {found.precision}): "
        + what.get(found.what, f"{found.what} not finite{at}"),
        style="bold",
    )
    if (origin := found.origin) is not None:
        console.print(f"Module    {escape(origin.place)}")
        console.print(f"Operator  {origin.operator}, in the {origin.phase} pass")
    if found.parts:
        console.print(f"Parts     {escape(', '.join(found.parts))}")
    if origin is not None:
        table = Table("tensor", "dtype", "shape", "lowest", "highest", "not finite", box=SIMPLE_HEAD)
        for name, tensors in (("input", origin.inputs), ("output", origin.outputs)):
            for one in tensors:
                low, high = ("" if value is None else f"{value:.4g}" for value in (one.low, one.high))
                shape = "x".join(map(str, one.shape))
                table.add_row(name, one.dtype, shape, low, high, f"{one.nonfinite_share:.1%}")
        console.print(table)
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True)
    if found.farthest:
        table = Table("module", "class", "own error", "error here", box=SIMPLE_HEAD)
        for module in found.farthest:
            table.add_row(
                escape(module.module), module.kind, f"{module.own_error:.1e}", f"{module.error:.1e}"
            )
        _print_whole(console, table)
        console.print(
            "Relative to fp32, ||y - y32|| / ||y32||: what the module adds to fp32's inputs, and what has "
            "come together up to it.",
            style="dim",
        )
    if found.remedies:
        table = Table("tried", "heals", "what came of it", box=SIMPLE_HEAD)
        for remedy in found.remedies:
            table.add_row(
                escape(shown(remedy.settings)), "yes" if remedy.heals else "no", escape(remedy.result)
            )
        console.print(table)
        healed_by = found.healed_by
        sentence = f"Use {shown(healed_by)}." if healed_by else "Nothing of what was tried heals it."
        console.print(sentence, style="bold", markup=False)


def _print_whole(console: Console, table: Table) -> None:
    """With names folded that are too long: one that is cut is another name."""
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)
