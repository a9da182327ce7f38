"""A study by its name, its file or a mapping, and its database."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.api.messages import progress_shown
from hpo.api.opening import (
    check_positive,
    existing_database,
    file_error_first,
    find_study,
    is_path,
    load_file,
    load_to_work,
    to_run,
    trust,
)
from hpo.code import use_code
from hpo.errors import HpoError, NoDatabaseError
from hpo.redaction import redact
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import Stop, end_of_job, stop_on_signals
from hpo.study.store.database import DEFAULT_URL, shown_url, storage_url
from hpo.study.store.storage import Storage

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.reading.study_record import StudyRecord


class NamedStudy:
    """A study as `hpo.Study` is given it, whose arguments it takes: where it lies, and its database."""

    def __init__(
        self,
        study: str | Path | Mapping[str, Any],
        *,
        storage: str | None = None,
        trust_code: str | Sequence[str] = (),
        trust_remote_code: bool = False,
        quiet: bool = False,
    ) -> None:
        for code in [trust_code] if isinstance(trust_code, str) else trust_code:
            trust(code)
        self._given = study if isinstance(study, Mapping) else None
        self._word = "" if isinstance(study, Mapping) else str(study)
        self._storage, self._trusts, self._quiet = storage, trust_remote_code, quiet
        if self._given is not None or is_path(self._word):
            _ = self._file  # raises for what is not valid

    def __repr__(self) -> str:
        """Describe the study by its file and, if that is a file, its database. This never fails or waits."""
        from hpo.report.messages import objectives_text, progress_message
        from hpo.study.reading.overview import glance

        file = None
        with suppress(HpoError):  # an invalid file is reported when it is used
            file = self._file
        name = self._word if file is None or not is_path(self._word or "/") else file.name
        seen = glance(self._storage, name)
        definition, counts = seen or ({}, {})
        facts = {"storage": redact(self._storage or os.environ.get("HPO_STORAGE") or DEFAULT_URL)}
        if goals := definition.get("objective") or (file and [vars(goal) for goal in file.objective]):
            metrics, directions = ([goal[key] for goal in goals] for key in ("metric", "direction"))
            facts["objective"] = objectives_text(metrics, directions)
        none = f"none of {file.num_trials} yet" if file else "none yet"
        has_budget = definition.get("budget") is not None
        progress = progress_message(counts, has_budget=has_budget) if counts else none
        facts["trials"] = "not read" if seen is None else progress
        return f"Study({', '.join([repr(name), *(f'{key}={value!r}' for key, value in facts.items())])})"

    @cached_property
    def _file(self) -> StudyConfig | None:
        """The study of the file or mapping. A name is read when the database does not suffice."""
        from hpo.config.study_config import study_of

        return load_file(self._word) if self._given is None else study_of(self._given)

    @property
    def file(self) -> StudyConfig:
        """The study of its file or mapping. Raises StudyFileError where there is none."""
        from hpo.config.study_config import load_study

        file = self._file if self._file is not None else load_study(self._word)
        use_code(file.code, f"The study `{file.name}`")  # another study's may be in use
        return file

    @property
    def config(self) -> StudyConfig:
        """The study of its file, else as in the database. Raises InputError if there is none, or its code
        is not trusted."""
        if self._file is not None:
            return self.file
        config, _ = find_study(self._word, storage_url(self._storage))
        self._check_trust(config, None)
        return config

    @property
    def record(self) -> StudyRecord:
        """All that the database has of the study, as of now. Raises StorageError where it has nothing."""
        with self.opened() as (_, record):
            return record

    @property
    def outline(self) -> StudyRecord:
        """The record in brief, see `read_study`: of a large study it takes a fraction of the time."""
        with self.opened(brief=True) as (_, record):
            return record

    @contextmanager
    def opened(self, *, brief: bool = False) -> Iterator[tuple[Storage, StudyRecord]]:
        """The database and what it has of the study. Raises StorageError if it has nothing.

        A name is that of a study in the database, if there is one, whatever lies in `studies/`.
        """
        with self._database() as database:
            yield database, read_study(database, self._name_in(database), brief=brief)

    @contextmanager
    def _database(self) -> Iterator[Storage]:
        with file_error_first(self._word), existing_database(self._storage) as database:
            yield database

    @property
    def name(self) -> str:
        """Of the study in the database, or of its file where there is no database yet."""
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

    def _name_in(self, database: Storage) -> str:
        is_stored = self._word and not is_path(self._word) and database.has_study(self._word)
        return self._word if is_stored or self._file is None else self._file.name

    def config_of(self, record: StudyRecord) -> StudyConfig:
        """The study as in its file; as stored if there is no file, or it is of another study.

        Raises StudyChangedError if the file differs from the stored study, and InputError as `check_trust`
        does.
        """
        from hpo.config.study_config import stored_study

        given = self._file if self._file is not None and self._file.name == record.name else None
        stored = record.definition
        config = stored_study(record.name, stored) if given is None else given.resumed(stored)
        self._check_trust(config, given)
        return config

    def _record_of(self, name: str) -> StudyRecord | None:
        """The study of this name in the database; None: nothing of it has run."""
        try:
            with existing_database(self._storage) as database:
                return read_study(database, name) if database.has_study(name) else None
        except NoDatabaseError:
            return None

    def _to_work(self, stop: Stop) -> tuple[StudyConfig, bool]:
        """The study as a worker runs it, and whether it is the user's own file or mapping."""
        if not self._word:
            return to_run(self.file), True
        return load_to_work(self._word, storage_url(self._storage), stop)

    @contextmanager
    def _stored(self) -> Iterator[tuple[Storage, str]]:
        """The database, and the name of the study to change: as it was given, or of the given file."""
        with progress_shown(quiet=self._quiet), self._database() as database:
            is_name = self._word and not is_path(self._word)
            yield database, self._word if is_name else self.file.name

    def _check_trust(self, config: StudyConfig, of_file: StudyConfig | None) -> None:
        from hpo.study.running.open_study import check_trust  # not for those that only look

        check_trust(config, of_file, self._trusts)

    @contextmanager
    def _stopping(self, until: str | None = None, timeout: float | None = None) -> Iterator[Stop]:
        """Around trials in this process: stopped by a signal, in several ranks where torchrun began them."""
        from hpo.api.running import ranks_of_torchrun

        check_positive(timeout=timeout)
        with (
            progress_shown(quiet=self._quiet),
            stop_on_signals(end_of_job(until), timeout) as stop,
            ranks_of_torchrun(),
        ):
            yield stop
