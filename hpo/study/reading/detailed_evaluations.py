"""Detailed evaluations of the best trials in the study's database, one document for each split."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from hpo.errors import DataError, RunError
from hpo.evaluation.record import read_document
from hpo.json_safe import json_safe
from hpo.study.store.schema import detailed_evaluations, studies
from hpo.study.store.storage import Storage

_logger = logging.getLogger(__name__)


def read_detailed_evaluations(
    connection: sa.Connection, name: str, numbers: Container[int]
) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Return the documents of these trials by trial and split. An unreadable one causes a warning."""
    query = sa.select(detailed_evaluations).where(detailed_evaluations.c.study == name)
    documents: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in connection.execute(query.order_by(detailed_evaluations.c.split)):
        if row.trial_number not in numbers:
            continue
        try:
            documents[row.trial_number][row.split] = _read(row.document)
        except DataError as error:
            _warn_once(
                f"The detailed evaluation of trial {row.trial_number} on {row.split} of {name} is left out: "
                f"{error} `hpo best STUDY --evaluate SPLIT` evaluates the best trial again."
            )
    return documents


@lru_cache(maxsize=1024)
def _warn_once(message: str) -> None:
    _logger.warning("%s", message)


def _read(text: str) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"this is no JSON: {error}.") from error
    return read_document(content)


def store_detailed_evaluation(
    storage: Storage, name: str, token: str, trial_number: int, document: Mapping[str, Any]
) -> None:
    """Store a detailed evaluation with its trial, and replace an earlier one of that split.

    Raises RunError if the study was deleted or made anew since its `token` was read (`Storage.study_token`).
    """
    table = detailed_evaluations
    key = {"study": name, "trial_number": trial_number, "split": document["split"]}
    text = json.dumps(json_safe(document))

    def store(connection: sa.Connection) -> None:
        # Written first, so that nobody deletes the study, or stores the same, meanwhile.
        here = sa.update(studies).where(studies.c.name == name, studies.c.token == token)
        if not connection.execute(here.values(token=token)).rowcount:
            raise RunError("the study was deleted, or made anew, while its trial was evaluated.")
        connection.execute(sa.delete(table).where(*(table.c[of] == value for of, value in key.items())))
        connection.execute(sa.insert(table).values(**key, document=text, created=storage.now))

    storage.write(store)
