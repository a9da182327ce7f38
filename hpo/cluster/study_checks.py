"""Checks of the studies of a database, and of this host: each takes a `Patient` and yields what is wrong.

Mending takes nothing from anybody: a slot is opened only while its dead worker is still its owner, and a
folder of checkpoints is removed only where this database is known to have had its study, because several
databases may share one `runs/`.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.cluster.finding import Finding
from hpo.config.checkpoint_config import CheckpointConfig
from hpo.config.study_config import StudyConfig, stored_study
from hpo.data.dataset import load_data
from hpo.data.sources import DATA_DIR, located
from hpo.device import GpuMemory, probe_device
from hpo.errors import DataError, InputError, RunError
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION, left_out
from hpo.study.artifact_store import open_artifact_store
from hpo.study.checkpoint_artifacts import drop_artifacts, num_artifacts
from hpo.study.checkpoint_folders import database_of, is_of, kept_checkpoints, noted_database
from hpo.study.lifecycle import checkpoint_config
from hpo.study.process import this_machine
from hpo.study.schema import slots, studies, workers
from hpo.study.sqlite_place import other_hosts
from hpo.study.storage import Storage

MAX_SKEW_SECONDS = 2.0
MAX_USED_SHARE = 0.1
"""Of a GPU's memory, by processes that are not workers of this database."""


@dataclass(frozen=True)
class Host:
    """What the checks know of this machine."""

    runs_dir: Path
    gpus: Sequence[GpuMemory] = ()
    clock: Callable[[], float] = time.time


@dataclass(frozen=True)
class Patient:
    """An open database with the tables of this hpo."""

    storage: Storage
    host: Host
    named: str | None
    """The study to look at; its data are read."""

    def studies(self) -> Iterator[sa.Row[Any]]:
        """The rows of `hpo_studies` of the studies that are there."""
        with self.storage.engine.connect() as connection:
            rows = connection.execute(sa.select(studies).order_by(studies.c.name)).all()
        yield from (
            row for row in rows if self.named in (None, row.name) and self.storage.has_study(row.name)
        )

    def slots(self, name: str) -> tuple[dict[int, sa.Row[Any]], set[str]]:
        """The slots of a study by number, and the workers of it that live."""
        with self.storage.engine.connect() as connection:
            rows = connection.execute(sa.select(slots).where(slots.c.study == name)).all()
            return {row.slot: row for row in rows}, self.storage.live_workers(connection, name)

    def trials(self, name: str) -> list[optuna.trial.FrozenTrial]:
        return self.storage.load_study(name).get_trials(deepcopy=False)


def sqlite_with_several_hosts(patient: Patient) -> Iterator[Finding]:
    """Whether workers of other hosts are in a SQLite file; `refuse_other_hosts` keeps more from joining."""
    storage = patient.storage
    if storage.engine.dialect.name != "sqlite":
        return
    with storage.engine.connect() as connection:
        if hosts := other_hosts(connection, storage.now, storage.lease_seconds):
            yield Finding(
                "error",
                f"Workers on {', '.join(hosts)} use this SQLite database over the network, which damages it.",
                "End them, and go on with PostgreSQL: `hpo database start`, then `hpo copy STUDY --to URL`.",
            )


def clock_skew(patient: Patient) -> Iterator[Finding]:
    """This machine's clock against the database's. Leases go by the latter, wherever the workers are."""
    with patient.storage.engine.connect() as connection:
        connection.execute(sa.select(patient.storage.now)).scalar()  # the second has no connection to make
        before = patient.host.clock()
        there = connection.execute(sa.select(patient.storage.now)).scalar_one()
        after = patient.host.clock()
    ahead = (before + after) / 2 - there
    if abs(ahead) > MAX_SKEW_SECONDS + (after - before) / 2:
        how = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'}"
        yield Finding(
            "warning",
            f"The clock of this host is {how} the database's.",
            "Set it by NTP. Leases go by the database's clock, but `--until` and the times in logs do not.",
        )


def stale_trials(patient: Patient) -> Iterator[Finding]:
    """Trials that are RUNNING, or slots that are taken, and no worker has them."""
    for row in patient.studies():
        before = {one.number for one in patient.trials(row.name) if one.state == TrialState.RUNNING}
        by_number, alive = patient.slots(row.name)
        for slot in by_number.values():
            if slot.state == "running" and slot.owner not in alive:
                which = f"slot {slot.slot} ({_trial_of(slot)})"
                yield Finding(
                    "warning",
                    f"Study {row.name}: {which} is with a dead worker, {slot.owner}.",
                    "Opens the slot for the next worker, which would take it over in any case.",
                    partial(_open_slot, patient.storage, slot),
                )
        taken = {slot.trial_number for slot in by_number.values() if slot.state != "done"}
        # A trial ends in the transaction that closes its slot, so one that still runs was in none.
        for trial in patient.trials(row.name) if before - taken else ():
            if trial.number in before - taken and trial.state == TrialState.RUNNING:
                reason = "it was RUNNING, but no slot of the study has it, so no worker would go on with it."
                yield Finding(
                    "warning",
                    f"Study {row.name}: trial {trial.number} is RUNNING, but no slot of the study has it.",
                    "Ends it as FAIL, which samplers do not see.",
                    partial(patient.storage.fail_trial, trial, Outcome.FAILED, reason),
                )


def _trial_of(slot: sa.Row[Any]) -> str:
    return "no trial yet" if slot.trial_number is None else f"trial {slot.trial_number}"


def _open_slot(storage: Storage, slot: sa.Row[Any]) -> None:
    same = (slots.c.study == slot.study, slots.c.slot == slot.slot, slots.c.owner == slot.owner)
    with storage.engine.begin() as connection:
        connection.execute(sa.update(slots).where(*same, slots.c.state == "running").values(state="open"))


def checkpoints(patient: Patient) -> Iterator[Finding]:
    """Folders, under `runs/` and where studies keep their checkpoints, that no trial will read."""
    rows = {f"checkpoints-{row.token[:8]}": row for row in replace(patient, named=None).studies()}
    configs = {row.name: checkpoint_config(row.name, json.loads(row.definition)) for row in rows.values()}
    runs = patient.host.runs_dir
    folders = [configs[row.name].folder_of(row.name, row.token, runs) for row in rows.values()]
    places = {runs, *(folder.parents[1] for folder in folders)}
    found = sorted(folder for place in places for folder in place.glob("*/checkpoints-*"))
    # Links lead to one of the others: `hpo copy --name` makes them.
    found = [folder for folder in found if folder.is_dir() and not folder.is_symlink()]
    trial_folders = {folder: sorted(folder.glob("trial-*")) for folder in found}
    here = noted_database(patient.storage)
    for folder, of_trials in trial_folders.items():  # listed before the trials, so that each has its trial
        row, whose = rows.get(folder.name), database_of(folder) or "an unknown database"
        if patient.named not in (None, folder.parent.name if row is None else row.name):
            continue
        if row is None:
            size = _num_bytes(folder)
            what = f"{folder} ({_mib(size)}) is of a study that this database does not have."
            if size == 0 or is_of(folder, here):
                yield Finding("warning", what, "Removes it.", partial(shutil.rmtree, folder))
            else:
                yield Finding("note", what, f"It was made with {whose}. Remove it if that has no use for it.")
        elif is_of(folder, here):
            yield from _superfluous(patient, row, configs[row.name].top_k, of_trials)
        elif of_trials:
            what = f"{folder}, of the study {row.name}, was last used by {whose}."
            yield Finding("note", what, "`hpo doctor` of that database looks for what no trial will read.")
    for folder, row in zip(folders, rows.values(), strict=True):
        if patient.named in (None, row.name) and is_of(folder, here):
            yield from _superfluous_artifacts(patient, row.name, configs[row.name])


def _superfluous_artifacts(patient: Patient, name: str, config: CheckpointConfig) -> Iterator[Finding]:
    """What `drop_artifacts` could not remove from a store that was away."""
    study = patient.storage.load_study(name)
    finished = {trial.number for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()}
    gone = finished - kept_checkpoints(study, config.top_k)
    if count := num_artifacts(patient.storage, name, gone):

        def drop() -> None:
            if (store := open_artifact_store(config)) is not None:
                drop_artifacts(store, patient.storage, name, gone)
            if num_artifacts(patient.storage, name, gone):
                raise RunError(f"{config.location} did not let all of them be removed.")

        what = f"Study {name}: {count} checkpoints in {config.location} are of trials that keep none."
        yield Finding("warning", what, "Removes them.", drop)


def _superfluous(
    patient: Patient, row: sa.Row[Any], top_k: int, folders: Sequence[Path]
) -> Iterator[Finding]:
    """What the trials of a study have left behind."""
    by_number, alive = patient.slots(row.name)
    busy = {
        slot.trial_number for slot in by_number.values() if slot.owner in alive and slot.state == "running"
    }
    trials = {trial.number: trial for trial in patient.trials(row.name)}
    kept = kept_checkpoints(patient.storage.load_study(row.name), top_k)
    for folder in folders:
        digits = folder.name.removeprefix("trial-")
        number = int(digits) if digits.isdecimal() else -1
        trial = trials.get(number)
        if trial is None or (trial.state.is_finished() and number not in kept):
            why = "which the study does not have" if trial is None else f"none of the {top_k} best"
            what = f"{folder} ({_mib(_num_bytes(folder))}) is of trial {digits}, {why}."
            yield Finding("warning", what, "Removes it.", partial(shutil.rmtree, folder))
        elif number not in busy:
            for half_written in sorted(folder.glob(".*.tmp")):
                what = f"{half_written} ({_mib(_num_bytes(half_written))}) was not written to its end."
                yield Finding("warning", what, "Removes it.", partial(shutil.rmtree, half_written))


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def full_gpus(patient: Patient) -> Iterator[Finding]:
    """GPUs whose memory other programs have: trials would find none, and end as `oom`."""
    here = (workers.c.machine == this_machine(), workers.c.state == "live")
    with patient.storage.engine.connect() as connection:
        rows = connection.execute(
            sa.select(workers.c.device, workers.c.study, workers.c.id).where(*here)
        ).all()
        alive = {name: patient.storage.live_workers(connection, name) for name in {row.study for row in rows}}
    ours = {row.device for row in rows if row.id in alive[row.study]}
    for gpu in patient.host.gpus:
        if gpu.device_id not in ours and gpu.used_bytes > MAX_USED_SHARE * gpu.total_bytes:
            used, total = (f"{num_bytes / 2**30:.1f} GiB" for num_bytes in (gpu.used_bytes, gpu.total_bytes))
            which = f"{gpu.name} ({gpu.device_id})"
            yield Finding(
                "warning",
                f"{which}: {used} of {total} are taken, and by no worker of this database.",
                "`nvidia-smi` shows by whom. End that, or set `amp.memory_fraction` to what is left.",
            )


def data_of_studies(patient: Patient) -> Iterator[Finding]:
    """Whether this host has the data of each study that is not finished, and the same as the others."""
    for row in patient.studies():
        config = stored_study(row.name, json.loads(row.definition))
        if row.state == "cancelled" or not any(
            slot.state != "done" for slot in patient.slots(row.name)[0].values()
        ):
            continue
        data = located(config.data)
        files = [data.path, *dict(data.files).values()]
        missing = [str(path) for path in files if path is not None and not path.exists()]
        if missing:
            yield Finding(
                "warning",
                f"Study {row.name}: {socket.gethostname()} does not have its data, {', '.join(missing)}.",
                f"Put them there, or name the folder that holds them in {DATA_DIR}, where workers run.",
            )
        elif patient.named is not None and row.data is not None and config.data.source != "hub":
            try:
                fingerprint = load_data(config.data).fingerprint
            except DataError as error:
                yield Finding("warning", f"Study {row.name}: {error}")
                continue
            if fingerprint != row.data:
                yield Finding(
                    "warning",
                    f"Study {row.name}: the data on {socket.gethostname()} are others than it was made with.",
                    "Copy those of a host where it runs; a worker here is refused.",
                )


def progress(patient: Patient) -> Iterator[Finding]:
    """Studies that are not finished and that no worker is in, and whether one here could go on with them."""
    for row in patient.studies():
        by_number, alive = patient.slots(row.name)
        left = [slot for slot in by_number.values() if slot.state != "done"]
        if not left or alive or row.state != "open":
            continue
        config = stored_study(row.name, json.loads(row.definition))
        what = f"Study {row.name}: {len(left)} of {len(by_number)} trials are left, and no worker is in it."
        if reason := _why_not_here(config, patient.trials(row.name), left):
            remedy = "Start a worker on another host; `hpo verify` shows what it can run."
            yield Finding("warning", f"{what} None of them can run here: {reason}", remedy)
        else:
            yield Finding("note", what, f"Go on with it: `hpo worker {row.name}`.")


def _why_not_here(
    config: StudyConfig, trials: Sequence[optuna.trial.FrozenTrial], left: Sequence[sa.Row[Any]]
) -> str:
    """Why this host's device can run none of the trials that are left; empty: it can."""
    params = [{} if slot.trial_number is None else trials[slot.trial_number].params for slot in left]
    needed = {
        name for one in params for name in ([one[PRECISION]] if PRECISION in one else config.precisions)
    }
    if config.amp.on_unsupported != "skip" or "fp32" in needed or not needed:
        return ""
    try:
        lacking = left_out(sorted(needed), probe_device(config.device), config.amp)
    except InputError as error:
        return str(error)
    return " ".join(dict.fromkeys(lacking.values())) if needed == lacking.keys() else ""
