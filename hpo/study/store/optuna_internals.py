"""Every use of Optuna beyond its public interface.

- Its tables: a trial is made in the transaction that inserts its claim, and whole studies are read, copied
  and deleted.
- The ids of its objects, its sorting by fronts, and a study that shows other trials to its samplers.
- A storage that hides foreign trials.

`tests/study/store/test_optuna_internals.py` lists the checked versions of Optuna.
"""

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages._rdb import models
from optuna.storages._rdb.models import SCHEMA_VERSION, BaseModel
from optuna.study import Study, StudyDirection
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.study._multi_objective import _fast_non_domination_rank
from optuna.study.study import _SYSTEM_ATTR_METRIC_NAMES
from optuna.trial import FrozenTrial, Trial, TrialState

from hpo.errors import StorageError, shorten
from hpo.outcome import Outcome
from hpo.study.store.failures import decoded
from hpo.study.store.schema import claims
from hpo.study.store.schema import studies as hpo_studies

tables: list[sa.Table] = BaseModel.metadata.sorted_tables
"""All tables of Optuna. A table comes after the tables that it references."""
_named = BaseModel.metadata.tables
studies = _named["studies"]
study_user_attributes = _named["study_user_attributes"]
study_system_attributes = _named["study_system_attributes"]
trials = _named["trials"]
params = _named["trial_params"]
table_of_values = _named["trial_values"]
user_attributes = _named["trial_user_attributes"]
system_attributes = _named["trial_system_attributes"]
intermediate_values = _named["trial_intermediate_values"]

REVISION = "v3.2.0.a"  # version of these tables; for any other version, Optuna checks its tables at opening
ENDED_OUTSIDE = "somebody ended it outside of hpo."  # reason of a trial of hpo after another program ended it
_FEW = 1000  # values that a statement of any database can hold

non_domination_ranks = _fast_non_domination_rank  # front of each row of losses [N, K], 0 for the first front


# Objects


def study_id_of(study: Study) -> int:
    return study._study_id


def trial_id_of(trial: Trial | FrozenTrial) -> int:
    return trial._trial_id


def all_trials(study: Study) -> list[FrozenTrial]:
    """Return the trials of a study by number, in all of Hyperband's brackets. Do not change them."""
    return study._get_trials(deepcopy=False, use_cache=True)


def is_in(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except (ValueError, TypeError):
        return False


def read_trials(study: Study) -> list[FrozenTrial]:
    """Read the trials of a study by number. In this thread, `all_trials` returns them until the next call.

    Optuna reads every unfinished trial at each call: most of the time of a claim.
    """
    study._thread_local.cached_all_trials = stored_trials(study)
    return study._thread_local.cached_all_trials


def open_trial(study: Study, number: int) -> Trial:
    """Return a trial for suggestions, and add it to Optuna's cache."""
    storage: Any = study._storage
    trial_id = storage.get_trial_id_from_study_id_trial_number(study._study_id, number)
    if trial_id not in storage._trial_id_to_study_id_and_number:
        frozen = storage._backend.get_trial(trial_id)
        with storage._lock:
            storage._add_trials_to_cache(study._study_id, [frozen])
    return Trial(study, trial_id)


def stored_trials(study: Study) -> list[FrozenTrial]:
    """Return all stored trials, including trials hidden by a `StudyView`. Do not change them."""
    return study._storage.get_all_trials(study._study_id, deepcopy=False)


class OwnTrials(_CachedStorage):
    """Optuna's storage with its cache, without foreign trials (`foreign`).

    A trial of hpo appears as FAIL if another program ended it: its values are not from hpo.
    """

    get_best_trial = BaseStorage.get_best_trial  # the cache would ask the database for it

    def __init__(self, backend: RDBStorage) -> None:
        super().__init__(backend)
        self._claimed: dict[int, dict[int, bool]] = defaultdict(dict)
        """Study id -> trial number -> true if the trial has a claim. This never changes."""

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        try:
            trials = super().get_all_trials(study_id, deepcopy=False)
        except (ValueError, TypeError, AssertionError) as error:  # Optuna's, of a value that it cannot decode
            raise StorageError(
                f"A trial is damaged ({shorten(repr(error), 200)}). Somebody has changed the database. "
                "`hpo status STUDY` may name the trial. Restore the study from a copy, or delete it."
            ) from error
        known = self._claimed[study_id]
        begun = [trial for trial in trials if trial.state != TrialState.WAITING]
        if unknown := [trial for trial in begun if trial.number not in known]:
            with self._backend.engine.connect() as connection:
                numbers = _claimed(connection, study_id, [trial.number for trial in unknown])
            if numbers is None:
                return super().get_all_trials(study_id, deepcopy, states)
            is_claimed = ((trial, trial.number in numbers) for trial in unknown)
            known |= {trial.number: has for trial, has in is_claimed if has or trial.state.is_finished()}
        own = (trial for trial in trials if known.get(trial.number, trial.state == TrialState.WAITING))
        shown = [trial for trial in map(_as_hpo_ended, own) if states is None or trial.state in states]
        return copy.deepcopy(shown) if deepcopy else shown

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        # Optuna would compare the distribution with that of another trial, which may be foreign.
        self._backend._set_trial_param(trial_id, param_name, param_value_internal, distribution, distribution)


def _as_hpo_ended(trial: FrozenTrial) -> FrozenTrial:
    if not trial.state.is_finished() or "outcome" in trial.user_attrs:  # hpo stores it with the end
        return trial
    shown = copy.copy(trial)
    shown.state, shown.values, shown.system_attrs = TrialState.FAIL, None, {}
    shown.user_attrs = {**trial.user_attrs, "outcome": Outcome.FAILED, "outcome_reason": ENDED_OUTSIDE}
    return shown


def _claimed(connection: sa.Connection, study_id: int, numbers: list[int]) -> set[int] | None:
    few = len(numbers) < _FEW
    these = claims.c.trial_number.in_(numbers) if few else claims.c.trial_number >= min(numbers)
    of_hpo = studies.join(hpo_studies, hpo_studies.c.name == studies.c.study_name)
    with_claims = of_hpo.outerjoin(claims, sa.and_(claims.c.study == studies.c.study_name, these))
    query = sa.select(claims.c.trial_number).select_from(with_claims).where(studies.c.study_id == study_id)
    claimed_numbers = {*connection.execute(query).scalars()}
    return claimed_numbers - {None} if claimed_numbers else None


class StudyView(Study):
    """A study that shows the trials of `read` instead of its own. `read` is called once, on first use."""

    def __init__(self, study: Study, read: Callable[[], list[FrozenTrial]]) -> None:
        # Not Optuna's own, which asks the database. A bracket of Hyperband has no other attributes.
        for name in ("study_name", "_study_id", "_storage", "_directions", "_thread_local", "pruner"):
            setattr(self, name, getattr(study, name))
        self._read = read

    @cached_property
    def _trials(self) -> list[FrozenTrial]:
        return self._read()

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,  # noqa: ARG002
    ) -> list[FrozenTrial]:
        shown = [trial for trial in self._trials if states is None or trial.state in states]
        return copy.deepcopy(shown) if deepcopy else shown


# Tables


def create_tables(connection: sa.Connection) -> None:
    """Create missing tables of Optuna and store their versions, in the connection's transaction."""
    BaseModel.metadata.create_all(connection)
    if stored_version(connection) is None:
        versions = {"schema_version": SCHEMA_VERSION, "library_version": optuna.__version__}
        connection.execute(sa.insert(_named["version_info"]).values(versions))
        config = Config()
        scripts = Path(models.__file__).parent / "alembic"  # they name the versions of the tables
        config.set_main_option("script_location", str(scripts).replace("%", "%%"))
        MigrationContext.configure(connection).stamp(ScriptDirectory.from_config(config), "head")


def stored_version(connection: sa.Connection) -> str | None:
    version: str | None = connection.execute(sa.select(_named["version_info"].c.library_version)).scalar()
    return version


def revision(connection: sa.Connection) -> str | None:
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


# Rows


def lock_trials(connection: sa.Connection, study_id: int) -> bool:
    """Lock the trials of a study, first in a transaction; return false if the study is gone.

    One transaction adds trials at a time, because each gets the next number. Optuna uses the same lock.
    """
    this = sa.select(studies.c.study_id).where(studies.c.study_id == study_id)
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # sqlite3 would begin at the first change
        return connection.execute(this).first() is not None
    return connection.execute(this.with_for_update()).first() is not None


def make_trial(
    connection: sa.Connection,
    study_id: int,
    *,
    fixed_params: Mapping[str, Any] | None = None,
    user_attrs: Mapping[str, Any] | None = None,
    waiting: bool = False,
) -> int:
    """Add a trial to a study after `lock_trials`, and return its number."""
    last = sa.select(sa.func.max(trials.c.number)).where(trials.c.study_id == study_id)
    number = sa.func.coalesce(last.scalar_subquery() + 1, 0)
    state, start = (TrialState.WAITING, None) if waiting else (TrialState.RUNNING, _now())
    new = sa.insert(trials).values(study_id=study_id, number=number, state=state, datetime_start=start)
    trial_id, number_made = connection.execute(new.returning(trials.c.trial_id, trials.c.number)).one()
    system_attrs = {} if fixed_params is None else {"fixed_params": fixed_params}
    set_trial_attributes(connection, trial_id, user_attrs or {}, system_attrs, is_new=True)
    return int(number_made)


def set_trial_attributes(
    connection: sa.Connection,
    trial_id: int,
    user_attrs: Mapping[str, Any],
    system_attrs: Mapping[str, Any] | None = None,
    *,
    is_new: bool = False,
) -> None:
    """Set attributes of a trial. With `is_new`, none of these names exists yet."""
    for table, attributes in ((user_attributes, user_attrs), (system_attributes, system_attrs)):
        stored = {key: json.dumps(value) for key, value in (attributes or {}).items()}
        rows = [{"trial_id": trial_id, "key": key, "value_json": text} for key, text in stored.items()]
        if rows and not is_new:
            names = [row["key"] for row in rows]
            old = sa.delete(table).where(table.c.trial_id == trial_id, table.c.key.in_(names))
            connection.execute(old)
        if rows:
            connection.execute(sa.insert(table), rows)


def clear_trial(connection: sa.Connection, trial_id: int, user_attrs: Iterable[str]) -> None:
    """Remove the parameters, values and system attributes of a trial, and some user attributes."""
    for table in (params, table_of_values, intermediate_values, system_attributes):
        connection.execute(sa.delete(table).where(table.c.trial_id == trial_id))
    _drop_attributes(connection, trial_id, user_attrs)


def _drop_attributes(connection: sa.Connection, trial_id: int, user_attrs: Iterable[str]) -> None:
    these = (user_attributes.c.trial_id == trial_id, user_attributes.c.key.in_([*user_attrs]))
    connection.execute(sa.delete(user_attributes).where(*these))


def set_intermediate_value(connection: sa.Connection, trial_id: int, step: int, value: float) -> None:
    """Store a finite intermediate value, replacing an older one of the same step."""
    of_step = (intermediate_values.c.trial_id == trial_id, intermediate_values.c.step == step)
    connection.execute(sa.delete(intermediate_values).where(*of_step))
    new = {"trial_id": trial_id, "step": step, "intermediate_value": value}
    connection.execute(sa.insert(intermediate_values).values(**new, intermediate_value_type="FINITE"))


CONSTRAINT = f"{_CONSTRAINTS_KEY}:"
"""Prefix of the system attribute of a constraint."""


def is_unfinished(trial_id: int) -> sa.ColumnElement[bool]:
    this = (trials.c.trial_id == trial_id, trials.c.state.in_((TrialState.RUNNING, TrialState.WAITING)))
    return sa.exists().where(*this)


def end_trial(
    connection: sa.Connection,
    trial_id: int,
    state: TrialState,
    *,
    values: Sequence[float] = (),
    user_attrs: Mapping[str, Any],
    constraints: Mapping[str, float] | None = None,
) -> bool:
    """End an unfinished trial; return false, and change nothing, if it has ended already."""
    unfinished = trials.c.state.in_((TrialState.RUNNING, TrialState.WAITING))
    end = sa.update(trials).where(trials.c.trial_id == trial_id, unfinished)
    end = end.values(state=state, datetime_complete=_now())
    if not connection.execute(end).rowcount:
        return False
    limits = {f"{CONSTRAINT}{name}": float(value) for name, value in (constraints or {}).items()}
    set_trial_attributes(connection, trial_id, user_attrs, limits)
    rows = [
        {"trial_id": trial_id, "objective": objective, "value": value, "value_type": "FINITE"}
        for objective, value in enumerate(values)
    ]
    if rows:
        connection.execute(sa.insert(table_of_values), rows)
    return True


def reopen_trial(connection: sa.Connection, trial_id: int, user_attrs: Iterable[str]) -> None:
    """Let a PRUNED trial run again, without its values, its constraints and some user attributes."""
    pruned = (trials.c.trial_id == trial_id, trials.c.state == TrialState.PRUNED)
    run = sa.update(trials).where(*pruned).values(state=TrialState.RUNNING, datetime_complete=None)
    if not connection.execute(run).rowcount:
        return
    connection.execute(sa.delete(table_of_values).where(table_of_values.c.trial_id == trial_id))
    _drop_attributes(connection, trial_id, user_attrs)
    limits = system_attributes.c.key.startswith(CONSTRAINT)
    connection.execute(sa.delete(system_attributes).where(system_attributes.c.trial_id == trial_id, limits))


def create_study(
    connection: sa.Connection, name: str, directions: Iterable[str], metric_names: Sequence[str]
) -> int:
    new = sa.insert(studies).values(study_name=name).returning(studies.c.study_id)
    study_id: int = connection.execute(new).scalar_one()
    for objective, direction in enumerate(directions):
        row = {"study_id": study_id, "objective": objective, "direction": StudyDirection[direction.upper()]}
        connection.execute(sa.insert(_named["study_directions"]).values(row))
    set_study_attribute(connection, study_id, _SYSTEM_ATTR_METRIC_NAMES, list(metric_names))
    return study_id


def enqueue_trials(connection: sa.Connection, study_id: int, enqueued: Iterable[tuple[Any, Any]]) -> None:
    """Enqueue trials, given as their parameters and user attributes."""
    for fixed_params, user_attrs in enqueued:
        make_trial(connection, study_id, fixed_params=fixed_params, user_attrs=user_attrs, waiting=True)


def find_study(connection: sa.Connection, name: str, key: str) -> tuple[int | None, Any]:
    """Return a study's id and its system attribute `key`. Each is None if it does not exist.

    Raises StorageError if the attribute is damaged.
    """
    row = connection.execute(sa.select(studies.c.study_id).where(studies.c.study_name == name)).first()
    if row is None:
        return None, None
    attributes = study_system_attributes
    query = sa.select(attributes.c.value_json).where(attributes.c.study_id == row.study_id)
    value: str = connection.execute(query.where(attributes.c.key == key)).scalar() or "null"
    return row.study_id, decoded(value, f"`{key}` of the study `{name}`")


def set_study_attribute(connection: sa.Connection, study_id: int, key: str, value: Any) -> None:
    of_study = (study_system_attributes.c.study_id == study_id, study_system_attributes.c.key == key)
    connection.execute(sa.delete(study_system_attributes).where(*of_study))
    new = {"study_id": study_id, "key": key, "value_json": json.dumps(value)}
    connection.execute(sa.insert(study_system_attributes).values(new))


def start_trial(connection: sa.Connection, trial_id: int) -> bool:
    waiting = (trials.c.trial_id == trial_id, trials.c.state == TrialState.WAITING)
    start = sa.update(trials).where(*waiting).values(state=TrialState.RUNNING, datetime_start=_now())
    return connection.execute(start).rowcount > 0


def delete_study_rows(connection: sa.Connection, name: str) -> None:
    this = sa.select(studies.c.study_id).where(studies.c.study_name == name)
    study_ids = list(connection.execute(this).scalars())
    in_study = sa.select(trials.c.trial_id).where(trials.c.study_id.in_(study_ids))
    for table in reversed(tables):
        if "study_id" in table.c:
            connection.execute(sa.delete(table).where(table.c.study_id.in_(study_ids)))
        elif "trial_id" in table.c:
            connection.execute(sa.delete(table).where(table.c.trial_id.in_(in_study)))


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)  # as Optuna stores times
