"""Detailed evaluations as artifacts of their trials, which the dashboard lists and serves.

Optuna's `upload_artifact` refuses a trial that is finished, and with it every trial that has an evaluation,
so the rows that it would write are written here. The files lie under `runs/STUDY/`, apart from checkpoints.
Their names follow from the study, the trial and the file: published again, they take the former's place.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import sqlalchemy as sa
from optuna.artifacts.exceptions import ArtifactNotFound

from hpo.errors import InputError, RunError
from hpo.json_safe import json_safe
from hpo.report.detailed_page import standalone_page
from hpo.report.detailed_tables import Detailed, detailed_evaluations, worst_errors
from hpo.report.report import write_whole
from hpo.report.tables import StudyTables
from hpo.study.store import optuna_internals

if TYPE_CHECKING:
    from hpo.study.reading.study_record import StudyRecord
    from hpo.study.store.storage import Storage

_KEY = "artifacts:"
"""What the attributes of a trial begin with that name artifacts, in Optuna and its dashboard."""
_MAKER = {"made_by": "hpo"}
"""In the attributes of our artifacts, and of no other."""
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MIMETYPES = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".csv": "text/csv",
}


class DashboardFiles:
    """The artifacts of all studies whose files lie under `runs_dir`, as one of Optuna's artifact stores.

    They can be read and removed. Nothing can be written: what is served is what hpo has made.
    """

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir

    def open_reader(self, artifact_id: str) -> BinaryIO:
        for path in self._paths(artifact_id):
            return path.open("rb")
        raise ArtifactNotFound(f"There is no artifact {artifact_id} under {self._runs_dir}.")

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:  # noqa: ARG002 (Optuna's names)
        raise InputError("Artifacts of this dashboard are made by hpo; none can be uploaded.")

    def remove(self, artifact_id: str) -> None:
        """Remove an artifact, if it is here: the dashboard asks for it before it deletes a study."""
        for path in self._paths(artifact_id):
            path.unlink(missing_ok=True)

    def _paths(self, artifact_id: str) -> Iterator[Path]:
        if _ID.fullmatch(artifact_id):
            yield from self._runs_dir.glob(f"*/dashboard-*/{artifact_id}")


def files_folders(study: str, runs_dir: Path) -> list[Path]:
    """Those of all studies that have had the name: a study that is made anew has a token of its own."""
    return sorted(path for path in (runs_dir / study).glob("dashboard-*") if path.is_dir())


def files_folder(database: Storage, study: str, runs_dir: Path) -> Path:
    """Where the dashboard's files of a study are; the token tells it from others of its name."""
    return runs_dir / study / f"dashboard-{database.study_token(study)[:8]}"


def remove_files(folder: Path) -> None:
    """Remove the dashboard's files of a study, if there are any. Raises RunError where they stay."""
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise RunError(f"The dashboard's files in {folder} cannot be removed: {error.strerror}.") from None


def publish_artifacts(database: Storage, record: StudyRecord, runs_dir: Path) -> dict[tuple[int, str], str]:
    """Attach what is known of the best trials in detail to them, in the place of what was attached before.

    Returns the path of the page in the dashboard, by the number of the trial and the split. Raises RunError
    where a file cannot be written.
    """
    folder, token = files_folder(database, record.name, runs_dir), database.study_token(record.name)
    attributes: dict[int, dict[str, str]] = {}
    pages: dict[tuple[int, str], str] = {}
    try:
        for one in detailed_evaluations(StudyTables(record)):
            for name, content in files_of(one, record.name).items():
                artifact_id = str(uuid.uuid5(uuid.UUID(int=0), f"{token}/{one.trial_number}/{name}"))
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / artifact_id, content)
                if name.endswith(".html"):
                    pages[one.trial_number, one.split] = artifact_id
                attributes.setdefault(one.trial_number, {})[f"{_KEY}{artifact_id}"] = json.dumps(
                    {
                        "artifact_id": artifact_id,
                        "filename": name,
                        "mimetype": _MIMETYPES[Path(name).suffix],
                        "encoding": None,
                        **_MAKER,
                    }
                )
        ids = database.persist(lambda: _replace(database, record.name, attributes))
        current = {key.removeprefix(_KEY) for keys in attributes.values() for key in keys}
        for path in folder.glob("*"):
            if path.name not in current:
                path.unlink(missing_ok=True)
        for other in set(files_folders(record.name, runs_dir)) - {folder}:
            shutil.rmtree(other)
    except OSError as error:
        raise RunError(
            f"the dashboard's files could not be written to {folder}: {error.strerror or error}. "
            "Free some space there."
        ) from error
    study_id = optuna_internals.study_id_of(database.load_study(record.name))
    return {
        place: f"/artifacts/{study_id}/{ids[place[0]]}/{artifact_id}"
        for place, artifact_id in pages.items()
        if place[0] in ids
    }


def _replace(database: Storage, study: str, attributes: dict[int, dict[str, str]]) -> dict[int, int]:
    """Have the trials of the study these artifacts of ours and no others.

    Returns the id of each trial by its number, as which `attributes` has it.
    """
    table, trials = optuna_internals.system_attributes, optuna_internals.trials
    of_study = trials.c.study_id == sa.select(optuna_internals.studies.c.study_id).where(
        optuna_internals.studies.c.study_name == study
    ).scalar_subquery()  # fmt: skip
    with database.engine.begin() as connection:
        ids = {row.number: row.trial_id for row in connection.execute(sa.select(trials).where(of_study))}
        stored = sa.select(table).where(table.c.trial_id.in_(sa.select(trials.c.trial_id).where(of_study)))
        for row in connection.execute(stored.where(table.c.key.startswith(_KEY))).all():
            if _is_ours(row.value_json):
                same = (table.c.trial_id == row.trial_id, table.c.key == row.key)
                connection.execute(sa.delete(table).where(*same))
        for number in attributes.keys() & ids.keys():
            optuna_internals.write_attributes(connection, table, ids[number], attributes[number])
    return ids


def _is_ours(value_json: str) -> bool:
    """Optuna keeps JSON in a JSON text; the dashboard writes null over what somebody removes."""
    value = json.loads(value_json)
    found: Any = json.loads(value) if isinstance(value, str) else None
    return isinstance(found, dict) and _MAKER.items() <= found.items()


def files_of(one: Detailed, study: str) -> dict[str, bytes]:
    """A page that stands alone, the document and the worst errors, by name."""
    return {
        f"{one.split}-evaluation.html": standalone_page(one, study).encode(),
        f"{one.split}-evaluation.json": json.dumps(json_safe(one.document), ensure_ascii=False).encode(),
        f"{one.split}-worst-errors.csv": worst_errors([one]).to_csv(index=False).encode(),
    }
