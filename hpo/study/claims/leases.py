"""Claims: the next trial of a worker, and the trial of a dead worker.

One configuration is one Optuna trial, from its start to its end, also if it pauses. A study starts exactly
`n_trials` of them, besides failed attempts with a retry. Optuna's trials and the rows of `hpo_claims` contain
the whole state, so a worker may be killed anywhere:

    WAITING                   enqueued, or the retry of a failed attempt: a worker starts it
    RUNNING, with a worker    runs
    RUNNING, without          continues from its checkpoint, with its number and its parameters
    RUNNING, paused           continues if it is promoted (`promotion`); no worker has it
    any other state           ended

A worker reads all trials, decides, and claims by one conditional change: the trial must still have the owner
of the snapshot. A trial is made, or started, in the transaction that counts the trials of the study. Optuna's
heartbeat does not serve: it runs only inside `study.optimize`, ends for good after a restart of the database,
and fails a trial instead of continuing it.

A trial ends as `crashed` after `MAX_DEATHS` deaths of its workers in a row without progress. The next worker
of the trial counts the death in the transaction of its claim. A worker that lost its GPU counts its own.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.config.portfolio import SHARE
from hpo.config.sections import NOT_SHARED
from hpo.errors import LeaseLostError, OutageError, StoppedError, StorageError
from hpo.outcome import Outcome, TrialResult
from hpo.study.claims.budget import StudyBudget
from hpo.study.claims.ending import FALLEN_BEHIND, NOT_PROMOTED, end_unclaimed, give_up, is_unchanged
from hpo.study.claims.lease import Lease as Lease
from hpo.study.claims.snapshot import Snapshot, Watch, num_trials_of_points
from hpo.study.claims.workers import Membership
from hpo.study.sampling.device_sampler import known_params
from hpo.study.sampling.points import Point, point_key, unused_points
from hpo.study.sampling.promotion import (
    PAUSED_ATTR,
    RESUMED_ATTR,
    RUN_ATTRS,
    WHOLE_ATTR,
    Promotion,
    is_paused,
)
from hpo.study.store.optuna_internals import (
    clear_trial,
    is_unfinished,
    lock_trials,
    make_trial,
    open_trial,
    set_trial_attributes,
    start_trial,
    study_id_of,
    trial_id_of,
)
from hpo.study.store.schema import claims, evaluations, studies, workers
from hpo.study.store.storage import is_stored, num_begun, num_open
from hpo.study.store.studies import BUDGET_SPENT, SOURCE_ATTR

MAX_REFUSALS = 20  # after this many failed claims of an unchanged trial, the cause is no faster worker

_logger = logging.getLogger(__name__)

Change = Callable[[sa.Connection], sa.Row[Any] | None]
"""A change of the claims. It returns the row of the claimed trial, or None to undo the change."""


@dataclass(eq=False)
class WorkerLease(Membership):
    """A worker that claims trials of a study and runs them. The end of the block releases its trial."""

    _: KW_ONLY
    max_retries: int
    refusal: Callable[[Any], str] = lambda _: ""
    """Reason why no worker can run an enqueued trial with these parameters; empty: none."""
    is_planned: bool = False  # true for a comparison, which chooses the parameters of all its trials
    promotion: Promotion | None = None  # rule for pauses; None: trials do not pause
    read_points: Callable[[], Sequence[Point]] | None = None
    """Reads the points of a grid or a comparison; None: the sampler proposes."""
    portfolio: Sequence[tuple[Point, str]] = ()
    """Published configurations and their sources, at most a tenth of the planned trials."""
    start_values: Callable[[Iterable[FrozenTrial], Point], Point] = lambda *_: {}
    """Chooses values of a new trial, given the trials of the study (`StartUp`)."""
    budget: StudyBudget | None = None
    shares_checkpoints: bool = True
    """True if all machines write their checkpoints to one folder or bucket. Otherwise a worker leaves a trial
    to live workers on the machine with its checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._watch = Watch(self._storage, self._study, self.promotion, self.budget)
        self._study_id = study_id_of(self._study)
        self.left: list[Mapping[str, Any]] = []
        """After a claim without a trial: the known parameters of the unfinished trials."""
        self._has_warned = False
        self._published = set[str]()  # keys of published configurations that have a trial
        self.has_ended_trials = False  # true if this worker has ended trials since the last reset to False

    # Claims

    def claim(self) -> Lease | None:
        """Claim a trial: first a free one, then a promoted, a waiting or a new one.

        Returns None if the study is not open, or if this worker can run no trial now; see `left`.
        """
        try:
            return self._claim_next()
        except KeyError:  # Optuna's, of a study that is gone
            if self._storage.read(self._is_study_open):
                raise
            return None

    def _claim_next(self) -> Lease | None:
        self._lease, refused = None, Counter[Any]()
        while self._storage.read(self._is_study_open):
            points = self.read_points() if self.read_points else None
            seen = self._watch.read(self.id, self.runnable, points)
            self._warn_of_hosts(seen.hosts)
            self._end(seen.fallen_behind, seen, FALLEN_BEHIND)
            trial = next(self._candidates(seen), None)
            if trial is not None:
                row = seen.rows.get(trial.number)
                waits = trial.state == TrialState.WAITING
                change = partial(self._start, points, seen) if waits else self._take_over
                if lease := self._claim(lambda it: change(it, trial, row)):  # noqa: B023
                    return lease
                refused[trial.number, row, seen.num_begun] += 1
                if max(refused.values()) > MAX_REFUSALS:
                    raise StorageError(
                        f"Trial {trial.number} of `{self._name}` cannot be claimed: its row in "
                        "hpo_claims does not fit its attributes. Somebody has changed them."
                    )
                continue  # another worker was faster
            if seen.may_begin and any(map(self.runnable, seen.new)):
                if lease := self._claim(lambda it: self._begin(it, seen, points)):  # noqa: B023
                    return lease
                continue
            self.left = seen.unfinished()
            if not self.left:
                self._finish(seen)
            return None
        return None

    def _warn_of_hosts(self, hosts: Set[str]) -> None:
        if not self.shares_checkpoints and not self._has_warned and hosts - {self.host}:
            self._has_warned = True
            _logger.warning("Workers of %s are in the study. %s", ", ".join(sorted(hosts)), NOT_SHARED)

    def _candidates(self, seen: Snapshot) -> Iterator[FrozenTrial]:
        if seen.is_spent:
            return
        for group in (seen.free, seen.promoted):
            runnable = [trial for trial in group if self.runnable(known_params(trial))]
            hosts = {trial.number: seen.rows[trial.number].host for trial in runnable}  # of the checkpoints
            here = [one for one in runnable if self.shares_checkpoints or hosts[one.number] == self.host]
            yield from here
            yield from (one for one in runnable if one not in here and hosts[one.number] not in seen.hosts)
        for trial in list(seen.waiting):
            fixed = trial.system_attrs.get("fixed_params", {})
            why = self.refusal(fixed) or self.refusal(trial.params)
            if self.is_planned and trial.number not in seen.rows and (fixed or trial.params):
                why = "A comparison chooses the parameters of its trials."
            if why:
                self._storage.write(lambda it: self._refuse(it, seen, trial, why))  # noqa: B023
                seen.waiting.remove(trial)
            elif self.runnable(known_params(trial)):
                yield trial

    def _refuse(self, connection: sa.Connection, seen: Snapshot, trial: FrozenTrial, why: str) -> None:
        """End a waiting trial. It gets a claim, or it would be foreign, but is none of the `n_trials`."""
        if not start_trial(connection, trial_id_of(trial)):
            return
        if trial.number not in seen.rows:
            clear_trial(connection, trial_id_of(trial), RUN_ATTRS)
            this = {"study": self._name, "trial_number": trial.number}
            connection.execute(sa.insert(claims).values(**this, counts=False))
        give_up(connection, trial, Outcome.FAILED, why)

    def _claim(self, change: Change) -> Lease | None:
        """Make a claim in one transaction; return None if there is none or the database is away."""

        def claim() -> sa.Row[Any] | None:
            with self._storage.engine.connect() as connection, connection.begin() as transaction:
                row = change(connection)
                if row is None:
                    transaction.rollback()
                return row

        try:
            row = self._storage.attempt(claim)
        except StoppedError:
            raise
        except OutageError:
            return None
        return None if row is None else self._lease_of(row)

    def _lease_of(self, row: sa.Row[Any]) -> Lease:
        self._lease = Lease(
            self._storage,
            self._name,
            self.token,
            self.id,
            self._storage.persist(lambda: open_trial(self._study, row.trial_number)),
            row,
            study_closed=self.study_closed,
            promotion=self._watch.promotion,
            budget=self.budget,
            host=self.host,
            shares_checkpoints=self.shares_checkpoints,
        )
        if self.budget is not None:
            self._lease.clock.num_sharing = self._storage.read(self._num_sharing)
        return self._lease

    def _take_over(
        self, connection: sa.Connection, trial: FrozenTrial, row: sa.Row[Any] | None
    ) -> sa.Row[Any] | None:
        """Claim a RUNNING trial without a worker, or with a dead one."""
        assert row is not None
        unchanged = is_unchanged(self._name, trial, row.owner)
        values: dict[str, Any] = {"owner": self.id, "paused_at": None}
        if row.owner not in (None, self.id) and not is_paused(trial):
            values |= self._death(connection, row)
        change = sa.update(claims).where(unchanged, self._is_open()).values(values).returning(claims)
        claimed = connection.execute(change).one_or_none()
        # Again, with the locked row: PostgreSQL may have waited for a worker that ended the trial.
        still = sa.select(sa.and_(is_unfinished(trial_id_of(trial)), self._is_open()))
        if claimed is None or not connection.execute(still).scalar():
            return None
        if is_paused(trial):
            resumed = {RESUMED_ATTR: trial.user_attrs[PAUSED_ATTR]}
            set_trial_attributes(connection, trial_id_of(trial), resumed)
        return claimed

    def _start(
        self,
        points: Sequence[Point] | None,
        seen: Snapshot,
        connection: sa.Connection,
        trial: FrozenTrial,
        row: sa.Row[Any] | None,
    ) -> sa.Row[Any] | None:
        """Start a WAITING trial. It becomes one of the study's `n_trials`, unless it is one already."""
        if not self._locks_open_study(connection) or not start_trial(connection, trial_id_of(trial)):
            return None
        if row is not None:
            this = (self._of_study, claims.c.trial_number == trial.number)
            change = sa.update(claims).where(*this).values(owner=self.id).returning(claims)
            return connection.execute(change).one_or_none()
        if num_open(connection, self._name) <= 0:
            return None
        clear_trial(connection, trial_id_of(trial), RUN_ATTRS)  # it may be a copy of another trial
        fixed = {**known_params(trial)}
        point = None
        if points is not None:  # also points that were tried before; open parameters must run on this device
            fitting = ({**point, **fixed} for point in points)
            point = self._next_point(connection, [*filter(self.runnable, fitting)])
        elif values := self.start_values(seen.trials.values(), fixed):
            if num_begun(connection, self._name) != seen.num_begun:
                return None  # other trials have begun since
            fixed |= values
        system_attrs = {"fixed_params": fixed if point is None else point}
        set_trial_attributes(connection, trial_id_of(trial), {}, system_attrs, is_new=True)
        return self._insert(connection, trial.number, point)

    def _begin(
        self, connection: sa.Connection, seen: Snapshot, points: Sequence[Point] | None
    ) -> sa.Row[Any] | None:
        if not self._locks_open_study(connection) or num_open(connection, self._name) <= 0:
            return None
        if points is not None:
            key, source = self._next_point(connection, points), dict[str, str]()
            point = key or {}
        else:
            key, (point, source) = None, self._next_published(seen)
            point |= self.start_values(seen.trials.values(), point)
        has_changed = points is None and num_begun(connection, self._name) != seen.num_begun
        if (points is not None and key is None) or (point and has_changed):
            return None
        number = make_trial(connection, self._study_id, fixed_params=point or None, user_attrs=source)
        return self._insert(connection, number, key)

    def _next_published(self, seen: Snapshot) -> tuple[Point, dict[str, str]]:
        for point, source in self.portfolio[: math.ceil(SHARE * seen.num_planned)]:
            key = point_key(point)
            if key not in self._published:
                if not any(point.items() <= known_params(trial).items() for trial in seen.trials.values()):
                    return {**point}, {SOURCE_ATTR: f"portfolio: {source}"}
                self._published.add(key)  # it stays so, and a later claim compares no trials
        return {}, {}

    def _locks_open_study(self, connection: sa.Connection) -> bool:
        if not lock_trials(connection, self._study_id):
            return False
        return bool(connection.execute(sa.select(self._is_open())).scalar())

    def _is_open(self) -> sa.ColumnElement[bool]:
        return is_stored(self._name, self.token, studies.c.state == "open")

    def _next_point(self, connection: sa.Connection, points: Sequence[Point]) -> Point | None:
        num_trials = num_trials_of_points(connection, self._name)
        return next(filter(self.runnable, unused_points(points, num_trials)), None)

    def _insert(self, connection: sa.Connection, number: int, point: Point | None) -> sa.Row[Any]:
        values = {"study": self._name, "trial_number": number, "owner": self.id}
        key = None if point is None else point_key(point)
        return connection.execute(sa.insert(claims).values(**values, point=key).returning(claims)).one()

    def _death(self, connection: sa.Connection, row: sa.Row[Any]) -> dict[str, int]:
        """Return the changes of a claim after its worker's death. An unreported checkpoint is no progress."""
        if connection.execute(sa.select(workers.c.id).where(workers.c.id == row.owner)).first() is None:
            return {}  # the database lost the worker's row, see `Membership`
        last_evaluation = sa.select(sa.func.max(evaluations.c.step)).where(
            evaluations.c.study == row.study, evaluations.c.trial_number == row.trial_number
        )
        step = max(connection.execute(last_evaluation).scalar() or 0, row.saved_step)
        count = 1 if step > row.death_step else row.deaths + 1
        return {"deaths": count, "death_step": max(step, row.death_step)}

    # Ends

    def _end(self, trials: Sequence[FrozenTrial], seen: Snapshot, reason: str) -> None:
        for trial in trials:
            owner = seen.rows[trial.number].owner
            self._storage.write(lambda it: end_unclaimed(it, self._name, trial, owner, reason))  # noqa: B023
            self.has_ended_trials = True

    def _finish(self, seen: Snapshot) -> None:
        """End the study: no trial runs, and none continues or begins."""
        by_budget = self.budget is not None and (seen.is_spent or seen.num_open > 0)
        self._end(seen.paused, seen, BUDGET_SPENT if by_budget else NOT_PROMOTED)
        self._end(seen.free, seen, BUDGET_SPENT)
        if seen.is_spent:
            self._end([trial for trial in seen.waiting if trial.number in seen.rows], seen, BUDGET_SPENT)
        if self.budget is not None:  # it has fewer trials than `n_trials` allows
            counted = sa.select(sa.func.count()).where(self._of_study, claims.c.counts).scalar_subquery()
            this = (studies.c.name == self._name, studies.c.n_trials > counted)
            change = sa.update(studies).where(*this).values(n_trials=counted)
            self._storage.write(lambda it: it.execute(change))

    def release(self, lease: Lease, result: TrialResult | None = None) -> None:
        lease.release(result)
        self._lease = None

    def record_death(self, lease: Lease) -> None:
        """Release a trial and count a death of this worker, which has lost its GPU.

        This process may stay alive, for example in a notebook. Then no other worker would count its death.
        """

        def write(connection: sa.Connection) -> None:
            if lease.update(connection):  # otherwise another worker has it
                this = (self._of_study, claims.c.trial_number == lease.number)
                row = connection.execute(sa.select(claims).where(*this)).one()
                lease.update(connection, owner=None, **self._death(connection, row))

        self._storage.write(write)
        self._lease = None

    def record_outcome(self, lease: Lease, result: TrialResult) -> None:
        """Store the outcome of a trial's run. Raises LeaseLostError, and stores nothing, without the lease.

        A `preempted` or `paused` trial stays RUNNING without a worker. A `failed` one may get a retry.
        """
        if result.outcome in (Outcome.PREEMPTED, Outcome.PAUSED):
            self.release(lease, result if result.outcome == Outcome.PAUSED else None)
            return
        values = result.values if result.outcome == Outcome.COMPLETE else (0.0,)
        if not values or not all(map(math.isfinite, values)):
            raise ValueError(f"a complete trial must have finite values, but got {values}")
        lease.end(result, self._retry(lease, result))
        self._lease, self.has_ended_trials = None, True

    def _retry(self, lease: Lease, result: TrialResult) -> dict[str, Any] | None:
        """Return the user attributes of the next attempt of a failed trial, or None without a retry.

        A trial that failed by decision (`on_unsupported: fail`) has no traceback and no retry.
        """
        if result.outcome != Outcome.FAILED or not result.traceback:
            return None
        try:
            read = self._storage.persist(lambda: self._study.get_trials(deepcopy=False))
        except KeyError as error:
            raise LeaseLostError(f"Trial {lease.number} is gone: its study was deleted.") from error
        retry_of = {trial.number: trial.user_attrs.get("retry_of") for trial in read}
        num_failures, number = 1, retry_of.get(lease.number)
        while num_failures <= self.max_retries and number in retry_of:
            num_failures, number = num_failures + 1, retry_of[number]
        if num_failures > self.max_retries:
            return None
        given = lease.trial.user_attrs
        enqueued = {name: given[name] for name in (SOURCE_ATTR, WHOLE_ATTR) if name in given}
        return {**enqueued, "retry_of": lease.number}
