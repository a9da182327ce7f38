"""A study with rows in all tables, and the content of a database about a study."""

import math
from dataclasses import replace
from datetime import datetime
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from hpo.study.claims.leases import WorkerLease
from hpo.study.reading.detailed_evaluations import store_detailed_evaluation
from hpo.study.reading.reader import read_study
from hpo.study.store import optuna_internals, schema
from hpo.study.store.copy import OURS
from hpo.study.store.optuna_internals import trials
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study
from support.detailed_documents import document, interval
from support.worker_process import begin, evaluate, result, study


def filled(storage: Storage) -> optuna.Study:
    """Return the study `tiny` with a trial in each state and all kinds of values."""
    config = study(6, objective={"metric": "score", "direction": "minimize"})
    opened = create_or_resume_study(storage, config)
    opened.set_user_attr("note", {"text": "Grüße \0 ☃", "list": [1, None, 0.1]})
    with WorkerLease(storage, opened, max_retries=1) as worker:
        for value in (0.1 + 0.2, 5e-324):
            lease, trial = begin(worker)
            trial.suggest_float("learning_rate", 1e-5, 1e-3, log=True)
            evaluate(storage, trial, 1, value)
            evaluate(storage, trial, 2, value, step=20)
            worker.record_outcome(lease, result("complete", values=(value,), telemetry={"a": [1]}))
            token = storage.study_token("tiny")
            found = document({}, score=interval(value))
            store_detailed_evaluation(storage, "tiny", token, trial.number, found)
        nonfinite, _ = begin(worker)
        worker.record_outcome(nonfinite, result("nonfinite"))
        _, trial = begin(worker)
        trial.suggest_categorical("fp_precision", ["fp32", "bf16", "fp16"])
        evaluate(storage, trial)
    opened.enqueue_trial({"learning_rate": 1e-4})
    odd = {
        "f": (0.1, FloatDistribution(0.1, 0.7, step=0.1)),
        "i": (2**53, IntDistribution(1, 2**53)),
        "c": (None, CategoricalDistribution((None, True, 1.5, "x"))),
    }
    opened.add_trial(
        create_trial(
            state=TrialState.COMPLETE,
            value=math.inf,
            params={name: value for name, (value, _) in odd.items()},
            distributions={name: distribution for name, (_, distribution) in odd.items()},
            intermediate_values={3: math.nan, 1: -math.inf, 2: 1 / 3},
            user_attrs={"name": "zwölf"},
            system_attrs={"constraints": [1.0, -0.5], "fixed_params": {}},
        )
    )
    with storage.engine.begin() as connection:
        when = datetime(2026, 1, 2, 3, 4, 5, 678901)
        connection.execute(sa.update(trials).where(trials.c.number == 0).values(datetime_start=when))
    return opened


def contents(storage: Storage) -> dict[str, Any]:
    """Return the content of the database about a study, without ids of rows."""
    opened = optuna.load_study(study_name="tiny", storage=storage.optuna._backend)  # without its cache
    trials = [
        {
            key: sorted(map(repr, value.items())) if isinstance(value, dict) else repr(value)  # NaN != NaN
            for key, value in vars(trial).items()
            if key != "_trial_id"
        }
        for trial in opened.trials
    ]
    record = read_study(storage, "tiny")
    found: dict[str, Any] = {
        "trials": trials,
        "order of the parameters": [list(trial.params) for trial in opened.trials],
        "attributes": (opened.user_attrs, storage.optuna.get_study_system_attrs(opened._study_id)),
        "directions": (opened.directions, opened.metric_names),
        "record": replace(record, workers=[replace(one, silent_seconds=0.0) for one in record.workers]),
    }
    with storage.engine.connect() as connection:
        for table in (schema.studies, schema.workers, *OURS):
            column = table.c.name if table is schema.studies else table.c.study
            rows = connection.execute(sa.select(table).where(column == "tiny").order_by(*table.primary_key))
            found[table.name] = [dict(row) for row in rows.mappings()]
    return found


def num_rows(storage: Storage) -> dict[str, int]:
    """Count the rows of all tables, Optuna's and ours, without the versions."""
    tables = [*optuna_internals.tables, *schema.metadata.sorted_tables]
    with storage.engine.connect() as connection:
        counts = {
            t.name: connection.execute(sa.select(sa.func.count()).select_from(t)).scalar_one() for t in tables
        }
    return {name: count for name, count in counts.items() if name != "version_info"}
