"""A study in its database: its record, its status and its best trials.

Nothing here imports transformers, pandas or plotly, so commands such as `hpo status` start faster.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpo.api.opening import RUNS, file_error_first, is_path, load_file, trust
from hpo.code import use_code
from hpo.config.study_config import StudyConfig, load_study, study_of
from hpo.errors import InputError, NoDatabaseError
from hpo.redaction import redact
from hpo.report import screens
from hpo.report.status import study_status
from hpo.report.terminal import Shown, ShownDict, ShownList
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord, best_trials
from hpo.study.store.database import DEFAULT_URL, shown_url, storage_url
from hpo.study.store.storage import Storage, existing_database


@dataclass(frozen=True)
class StudyResult(Shown):
    """Result of an operation on a study: `text` is for a person, `as_json` for `--json`."""

    study: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _with_frames(study: Any, frames: Any) -> dict[str, Any]:
    """Write frames into a folder of the output, and return the study with it as its data."""
    from hpo.data.frames import write_frames

    data = study.get("data") if isinstance(study, Mapping) else None
    if not isinstance(data, Mapping) or "tasks" not in data or {"source", "path", "files", "hub"} & {*data}:
        raise InputError(
            "`hpo.Study` with `data` takes a mapping with the keys of a study file. Its `data` must have "
            "tasks and no source: {tasks: {x: {kind: single_label}}, columns: {labels: {x: class}}}."
        )
    return {**study, "data": {**data, "source": "parquet", "path": write_frames(frames, RUNS / "_data")}}


class StoredStudy:
    """A study and its database; takes the arguments of `hpo.Study`."""

    def __init__(
        self,
        study: str | Path | Mapping[str, Any],
        *,
        data: Any = None,
        storage: str | None = None,
        trust_code: str | Sequence[str] = (),
        trust_remote_code: bool = False,
        quiet: bool = False,
    ) -> None:
        for code in [trust_code] if isinstance(trust_code, str) else trust_code:
            trust(code)
        if data is not None:
            study = _with_frames(study, data)
        self._given = study if isinstance(study, Mapping) else None
        self._word = "" if isinstance(study, Mapping) else str(study)
        self._storage, self._trusts, self.quiet = storage, trust_remote_code, quiet
        if self._given is not None or is_path(self._word):
            _ = self._file  # raises if it is not valid

    def __repr__(self) -> str:
        url = redact(self._storage or os.environ.get("HPO_STORAGE") or DEFAULT_URL)
        name = self._word or (self._file.name if self._file is not None else "")
        return f"Study({name!r}, storage={url!r})"

    @cached_property
    def _file(self) -> StudyConfig | None:
        """The study of the file or mapping; None if only the database can have it."""
        return load_file(self._word) if self._given is None else study_of(self._given)

    @property
    def file(self) -> StudyConfig:
        """The study of its file or mapping. Raises StudyFileError if there is none."""
        file = self._file if self._file is not None else load_study(self._word)
        use_code(file.code, f"The study `{file.name}`")  # another study's may be in use
        return file

    @property
    def file_name(self) -> str | None:
        """The given name or path of the study file, if there is such a file."""
        return self._word if self._word and self._file is not None else None

    @property
    def record(self) -> StudyRecord:
        """The stored study. Raises StorageError if there is none."""
        with self.opened() as (_, record):
            return record

    @contextmanager
    def opened(self) -> Iterator[tuple[Storage, StudyRecord]]:
        """Open the database and read the study. Raises StorageError if it is not there.

        A name means the study in the database, if there is one, even if `studies/` has such a file.
        """
        with file_error_first(self._word), existing_database(self._storage) as database:
            yield database, read_study(database, self._name_in(database))

    @property
    def name(self) -> str:
        """Name of the study in the database, or in its file if there is no database yet."""
        try:
            with existing_database(self._storage) as database:
                return self._name_in(database)
        except NoDatabaseError:
            if self._file is None:
                raise
            return self._file.name

    @property
    def place(self) -> str:
        """The database in words, without a password."""
        return shown_url(storage_url(self._storage))

    def status(self) -> ShownDict:
        """Return the content of `hpo status --json`."""
        record = self.record
        numbers = study_status(record)
        return ShownDict(numbers, lambda: screens.status(record, numbers))

    def best(self) -> list[TrialRecord]:
        """Return the best complete trial; with several objectives the Pareto front."""
        record = self.record
        return ShownList(best_trials(record), lambda: screens.best(record))

    def _name_in(self, database: Storage) -> str:
        is_stored = self._word and not is_path(self._word) and database.has_study(self._word)
        return self._word if is_stored or self._file is None else self._file.name
