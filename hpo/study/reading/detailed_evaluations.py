"""Evaluations of trials in the study's database, besides their rows of metrics.

- Detailed evaluations of the best trials, one document for each split.
- Row statistics of the trials of a comparison: the `RowStatistics` of all tasks as one NumPy archive, some
  kilobytes for a thousand texts. Any metric, and each example's contribution to it, can be computed later.
"""

import io
import json
import logging
import zipfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import sqlalchemy as sa
from scipy.sparse import csr_array

from hpo.errors import DataError, RunError
from hpo.evaluation.record import read_document
from hpo.json_safe import json_safe
from hpo.study.claims.lease import Lease
from hpo.study.store.schema import detailed_evaluations, row_statistics, studies
from hpo.study.store.storage import Storage
from hpo.tasks.kind import Task, kind_of
from hpo.training.metrics import RowStatistics

_logger = logging.getLogger(__name__)

_SPARSE = ("data", "indices", "indptr", "shape")


def read_detailed_evaluations(
    connection: sa.Connection, name: str
) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Return the documents of a study by trial and split. An unreadable one causes a warning."""
    query = sa.select(detailed_evaluations).where(detailed_evaluations.c.study == name)
    documents: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in connection.execute(query.order_by(detailed_evaluations.c.split)):
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
    """Store a detailed evaluation in place of an earlier one. Raises RunError if the study is gone."""
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


def store_row_statistics(
    storage: Storage,
    lease: Lease,
    key: tuple[str, int],
    statistics: Mapping[str, RowStatistics],
    metrics: Collection[str] = (),
) -> None:
    """Store the statistics of the trial `key`, its study and number, with probabilities if the primary metric
    or `metrics` need them. Raises LeaseLostError."""
    study, number = key
    of_trial = (row_statistics.c.study == study, row_statistics.c.trial_number == number)
    row = {"study": study, "trial_number": number, "content": _packed(statistics, metrics)}

    def store(connection: sa.Connection) -> None:
        lease.hold(connection)
        connection.execute(sa.delete(row_statistics).where(*of_trial))
        connection.execute(sa.insert(row_statistics).values(row))

    storage.write(store)


def read_row_statistics(
    storage: Storage, study: str, tasks: Sequence[Task]
) -> dict[int, dict[str, RowStatistics]]:
    """Return the statistics of a study's trials by number and task. Raises RunError if one is damaged."""
    query = sa.select(row_statistics).where(row_statistics.c.study == study)
    by_trial = {}
    for row in storage.read(lambda connection: connection.execute(query).all()):
        try:
            with np.load(io.BytesIO(row.content), allow_pickle=False) as archive:
                by_trial[row.trial_number] = {task.name: _of_task(archive, task) for task in tasks}
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            raise RunError(
                f"The row statistics of trial {row.trial_number} of `{study}` cannot be read "
                f"({type(error).__name__}). Compare anew: hpo delete {study}"
            ) from error
    return by_trial


def _packed(statistics: Mapping[str, RowStatistics], metrics: Collection[str] = ()) -> bytes:
    arrays: dict[str, Any] = {}
    for task, of in statistics.items():
        arrays[f"{task}/num_examples"] = np.array(of.num_examples)
        arrays[f"{task}/index"] = of.index_N
        arrays[f"{task}/rows"] = np.array(json.dumps(of.rows))
        arrays |= {} if of.group_E is None else {f"{task}/group": of.group_E}
        needed = {f"{task}/{of.task.primary_metric}", *metrics}
        is_needed = any(f"{task}/{one}" in needed for one in kind_of(of.task).of_probabilities)
        for name, values_N in of.values_N.items():
            arrays |= {f"{task}/values/{name}": values_N} if is_needed or name != "probability" else {}
        for name, counts_NC in of.counts_NC.items():
            arrays |= {f"{task}/counts/{name}/{part}": getattr(counts_NC, part) for part in _SPARSE}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _of_task(archive: Mapping[str, Any], task: Task) -> RowStatistics:
    def named(kind: str) -> dict[str, str]:
        start = f"{task.name}/{kind}/"
        return {key.removeprefix(start).partition("/")[0]: key for key in archive if key.startswith(start)}

    counts = {}
    for name in named("counts"):
        parts = {part: archive[f"{task.name}/counts/{name}/{part}"] for part in _SPARSE}
        shape = tuple(parts.pop("shape").tolist())
        counts[name] = csr_array((parts["data"], parts["indices"], parts["indptr"]), shape=shape)
    return RowStatistics(
        task,
        int(archive[f"{task.name}/num_examples"]),
        archive[f"{task.name}/index"].astype(np.intp),
        counts,
        {name: archive[key] for name, key in named("values").items()},
        _rows(json.loads(str(archive[f"{task.name}/rows"]))) if f"{task.name}/rows" in archive else ((), ()),
        archive.get(f"{task.name}/group"),
    )


def _rows(pair: Any) -> Any:
    """Turn truths and predictions from JSON into lists of rows; JSON has lists for the tuples of spans."""
    return tuple(
        [
            [tuple(one) if isinstance(one, list) else one for one in row] if isinstance(row, list) else row
            for row in rows
        ]
        for rows in pair
    )
