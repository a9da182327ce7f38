"""Detailed evaluations in the study's database: of the best trials, one document a split."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from hpo.errors import DataError, RunError
from hpo.json_safe import json_safe
from hpo.study.store.schema import detailed_evaluations, studies

if TYPE_CHECKING:
    from hpo.study.store.storage import Storage

_logger = logging.getLogger(__name__)


def read_detailed_evaluations(
    connection: sa.Connection, name: str, numbers: Container[int]
) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Return the documents of these trials by trial and split.

    An unreadable one is left out with a warning.
    """
    query = sa.select(detailed_evaluations).where(detailed_evaluations.c.study == name)
    documents: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in connection.execute(query.order_by(detailed_evaluations.c.split)):
        if row.trial_number not in numbers:
            continue
        try:
            documents[row.trial_number][row.split] = _read(row.document)
        except DataError as error:
            what = f"trial {row.trial_number} on {row.split}"
            _say_left_out(f"The detailed evaluation of {what} of {name} is left out: {error}")
    return documents


@lru_cache(maxsize=1024)
def _say_left_out(what: str) -> None:
    """Once, however often a study is read."""
    _logger.warning("%s `hpo best STUDY --evaluate SPLIT` makes that of the best trial anew.", what)


def _read(text: str) -> Mapping[str, Any]:
    from hpo.evaluation.record import read_document  # SciPy, which a study without a document needs not

    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"this is no JSON: {error}.") from error
    return read_document(content)


def store_detailed_evaluation(
    storage: Storage, name: str, token: str, trial_number: int, document: Mapping[str, Any]
) -> None:
    """Keep a detailed evaluation with its trial, in place of an earlier one of that split.

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
