"""Making a study and running it here: what is checked first, and who gets which device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import optuna
import pytest
import sqlalchemy as sa
from support.tiny import CPU, GPU, write_study
from support.worker_process import begin, evaluate, run_trials, study, worker_on

from hpo.config.resolved_study import ResolvedStudy, resolve_study
from hpo.config.study_config import load_study
from hpo.errors import DataError, InputError, StorageError
from hpo.study.reading.reader import read_study
from hpo.study.running import run as run_module
from hpo.study.running.run import OpenOptions, check_precisions, open_study, run_study
from hpo.study.running.stopping import WORKERS_ON_DEVICE, Stop
from hpo.study.running.supervisor import DeviceShare, WorkerProcesses
from hpo.study.running.worker import RunSummary
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.store import storage as storage_module
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study
from hpo.trial.compat import checked_on
from hpo.trial.trial_parts import fit_pruner

PRECISIONS = {"fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]}}


class FakeExecutor:
    """Stands for the executor of a study; `problem` is what its check finds."""

    problem: Exception | None = None
    folder: Path
    made: list[FakeExecutor]

    def __init__(self, resolved: ResolvedStudy, *_: Any) -> None:
        self.resolved = resolved
        self.study, self.device, self.amp = resolved.config, resolved.device, resolved.amp
        self.fingerprint = "x"
        self.num_checks = 0
        self.made.append(self)

    def fit_pruner(self) -> tuple[Any, str]:
        splits: Any = {"train": range(48), "validation": range(24)}
        return fit_pruner(self.study, SimpleNamespace(splits=splits))  # type: ignore[arg-type]

    def check_study(self) -> None:
        self.num_checks += 1
        if self.problem:
            raise self.problem

    def trial_folder(self, *_: Any) -> Path:
        return self.folder / "checkpoints" / "trial"


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[FakeExecutor]]:
    """The class of the executors that are made; `made` has them."""
    FakeExecutor.made, FakeExecutor.folder = [], tmp_path
    monkeypatch.setitem(sys.modules, "hpo.trial.own_executor", SimpleNamespace(build_executor=FakeExecutor))
    yield FakeExecutor
    FakeExecutor.problem = None


def train_one(storage: Storage, config: Any) -> None:
    """Run the study's trials, each with an evaluation."""
    run_trials(storage, config, lambda trial: evaluate(storage, trial))


# A study is made last


def test_what_the_check_finds_leaves_no_trace(
    sqlite_url: str, tmp_path: Path, executors: type[FakeExecutor]
) -> None:
    executors.problem = DataError("two classes of one name")
    with pytest.raises(DataError), open_study(study(), sqlite_url, tmp_path):
        pass
    assert not list(tmp_path.glob("hpo.db*"))
    with open_storage(sqlite_url) as storage:
        create_or_resume_study(storage, study(name="other"))
    with pytest.raises(DataError), open_study(study(), sqlite_url, tmp_path):
        pass
    with open_storage(sqlite_url) as storage:
        assert not storage.has_study("tiny")
        assert storage.has_study("other")


@pytest.mark.usefixtures("executors")
def test_who_makes_a_study_makes_the_store_of_its_checkpoints(
    sqlite_url: str, tmp_path: Path, s3: str
) -> None:
    """Also a worker, as of Kubernetes, that is given the study's file."""
    config = study(1, checkpoint={"location": s3})
    with open_study(config, sqlite_url, tmp_path, OpenOptions(resize=False, is_file=True)):
        assert fsspec.filesystem("s3").exists(f"{s3}/.hpo-artifacts")


@pytest.mark.parametrize(
    ("begun", "num_checks"), [("not", 1), ("killed before it was evaluated", 0), ("ended", 0)]
)
def test_a_study_is_checked_until_one_of_its_trials_has_trained(
    storage: Storage, tmp_path: Path, executors: type[FakeExecutor], begun: str, num_checks: int
) -> None:
    create_or_resume_study(storage, study(1))
    if begun == "killed before it was evaluated":
        with worker_on(storage, study(1)) as worker:
            begin(worker)
        with storage.engine.begin() as connection:
            connection.execute(sa.update(claims).values(saved_step=40))
    if begun == "ended":
        train_one(storage, study(1))
    with open_study(study(2), storage.url, tmp_path) as opened:
        assert opened.stored.counts["open"] == (2 if begun == "not" else 1)
        assert opened.executor is executors.made[0]
    assert [executor.num_checks for executor in executors.made] == [num_checks]


def test_a_start_opens_the_database_once_and_reads_no_trials(
    storage: Storage, tmp_path: Path, executors: type[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened_database(*args: Any, **kwargs: Any) -> Any:
        opened.append(args)
        return open_database(*args, **kwargs)

    def note(_: Any, __: Any, statement: str, *___: object) -> None:
        statements.append(statement)

    open_database, opened, statements = storage_module.open_database, [], []
    monkeypatch.setattr(storage_module, "open_database", opened_database)
    create_or_resume_study(storage, study(3))
    train_one(storage, study(3))
    create_or_resume_study(storage, study(8))
    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        with open_study(study(8), storage.url, tmp_path, OpenOptions(resize=False)) as started:
            assert started.stored.counts == {"open": 5, "running": 0, "done": 3}
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
    assert len(opened) == 1
    assert statements
    assert not [text for text in statements if "FROM trial_" in text or "evaluations.metrics" in text]
    assert executors.made


def test_the_parent_of_several_workers_checks_for_them(
    sqlite_url: str, tmp_path: Path, executors: type[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_study(study(), sqlite_url, tmp_path, OpenOptions(trials_run="in workers")) as opened:
        assert opened.executor is None
    assert [executor.num_checks for executor in executors.made] == [1]
    monkeypatch.setenv(WORKERS_ON_DEVICE, "2")
    with open_study(study(), sqlite_url, tmp_path, OpenOptions(resize=False)) as opened:
        assert opened.executor is executors.made[1]
    assert executors.made[1].num_checks == 0


def test_a_study_that_was_deleted_in_the_dashboard_begins_anew(
    storage: Storage, tmp_path: Path, executors: type[FakeExecutor]
) -> None:
    create_or_resume_study(storage, study(1))
    train_one(storage, study(1))
    before = storage.study_token("tiny")
    optuna.delete_study(study_name="tiny", storage=storage.optuna)
    with pytest.raises(StorageError, match="was deleted"):
        read_study(storage, "tiny")
    with open_study(study(2), storage.url, tmp_path) as opened:
        assert (opened.stored.has_trained, opened.stored.counts["open"]) == (False, 2)
    assert storage.study_token("tiny") != before
    assert [executor.num_checks for executor in executors.made] == [1]


def test_a_finished_study_loads_neither_data_nor_model(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_or_resume_study(storage, study(2))
    train_one(storage, study(2))
    monkeypatch.setitem(sys.modules, "hpo.trial.executor", None)  # importing it is an error
    with open_study(study(2), storage.url, tmp_path) as opened:
        assert run_study(opened).outcomes == {}


def test_n_trials_raised_while_a_finished_study_is_opened(
    storage: Storage, tmp_path: Path, executors: type[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_stored(*args: Any) -> Any:
        stored = original(*args)
        create_or_resume_study(storage, study(3))
        return stored

    create_or_resume_study(storage, study(1))
    train_one(storage, study(1))
    original = run_module.read_stored
    monkeypatch.setattr(run_module, "read_stored", read_stored)
    with open_study(study(1), storage.url, tmp_path, OpenOptions(resize=False)) as opened:
        assert opened.config.n_trials == 3
        assert opened.executor is executors.made[0]
        assert opened.executor.cache is opened.storage


# What this device cannot run


def searching(*names: str, **amp: Any) -> Any:
    return study(search_space={"fp_precision": {"type": "categorical", "choices": names}}, amp=amp)


@pytest.mark.usefixtures("executors")
@pytest.mark.parametrize("on_unsupported", ["skip", "prune", "fallback", "fail"])
def test_only_skip_leaves_out_what_is_searched(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_unsupported: str
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(run_module, "probe_device", lambda _: CPU)
    monkeypatch.setattr(
        run_module, "run_worker", lambda *_, **options: given.update(options) or RunSummary("stopped")
    )
    config = searching("fp32", "bf16", on_unsupported=on_unsupported)
    with open_study(config, sqlite_url, tmp_path) as opened:
        assert opened.left_out.keys() == ({"bf16"} if on_unsupported == "skip" else set())
        run_study(opened, stop=Stop())
    assert given["device"].left_out.keys() == {"bf16"}


def test_a_study_of_which_nothing_can_run_here_is_not_made(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "probe_device", lambda _: CPU)
    config = searching("bf16", "tf32")
    with pytest.raises(InputError, match="it runs none of bf16"), open_study(config, sqlite_url, tmp_path):
        pass
    assert not list(tmp_path.glob("hpo.db*"))


@pytest.mark.parametrize("changes", [{"training": {"fp_precision": "tf32"}}, {"device": "cuda"}])
def test_a_study_for_other_machines_is_made(
    sqlite_url: str,
    tmp_path: Path,
    executors: type[FakeExecutor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = study(search_space={}, **changes)
    with open_study(config, sqlite_url, tmp_path, OpenOptions(trials_run="elsewhere")) as opened:
        assert opened.stored.counts["open"] == 8
        assert opened.executor is None
    assert [(executor.device.type, executor.num_checks) for executor in executors.made] == [("cpu", 1)]
    assert "No trial can run on this machine" in caplog.text


def test_fallback_runs_what_works() -> None:
    config = study(search_space={}, amp={"on_unsupported": "fallback", "preset": "ultra"})
    assert check_precisions(resolve_study(config, CPU)).keys() == {"bf16"}


@pytest.mark.parametrize("on_unsupported", ["skip", "prune", "fail"])
@pytest.mark.parametrize(("preset", "precision"), [("advanced", "fp16"), ("ultra", "bf16")])
def test_the_precision_of_a_preset_must_run_here(on_unsupported: str, preset: str, precision: str) -> None:
    amp = {"preset": preset, "on_unsupported": on_unsupported}
    with pytest.raises(InputError, match=f"it runs none of {precision}"):
        check_precisions(resolve_study(study(search_space={}, amp=amp), CPU))
    fixed = study(search_space={}, training={"fp_precision": "fp32"}, amp=amp)
    assert check_precisions(resolve_study(fixed, CPU)) == {}


# Devices and memory


@pytest.mark.usefixtures("executors")
@pytest.mark.parametrize(("num_workers", "gib"), [("4", 19), ("1", 80)])
def test_sampler_knows_the_memory_of_its_worker(
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_workers: str,
    gib: int,
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setenv(WORKERS_ON_DEVICE, num_workers)
    monkeypatch.setattr(run_module, "probe_device", lambda _: GPU)
    monkeypatch.setattr(
        run_module, "run_worker", lambda *_, **options: given.update(options) or RunSummary("stopped")
    )
    config = study(1, search_space={})
    with open_study(config, sqlite_url, tmp_path) as opened:
        run_study(opened, stop=Stop())
    assert given["device"] == WorkerDevice("GPU-0", gib * 2**30, {}, GPU.kind, checked_on(GPU))


@pytest.mark.usefixtures("executors")
def test_several_workers_are_processes(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def run_workers(config: Any, _: Storage, runs_dir: Path, processes: Any, __: Stop) -> RunSummary:
        given.extend((config.path, runs_dir, processes.shares))
        return RunSummary("elsewhere")

    monkeypatch.setattr(run_module, "run_workers", run_workers)
    monkeypatch.setattr(run_module, "probe_device", lambda _: CPU)
    config = load_study(write_study(tmp_path, amp={}, search_space=PRECISIONS))
    shares = [DeviceShare(2)] * 2
    with open_study(config, sqlite_url, tmp_path / "runs", OpenOptions(trials_run="in workers")) as opened:
        summary = run_study(opened, WorkerProcesses(shares), stop=Stop())
    assert given == [tmp_path / "tiny.yaml", tmp_path / "runs", shares]
    assert summary == RunSummary("elsewhere", elsewhere=("bf16",))


@pytest.mark.usefixtures("executors")
@pytest.mark.parametrize("ended", ["finished", "stopped", "timeout", "elsewhere", "closed"])
@pytest.mark.parametrize("is_companion", [False, True])
def test_who_may_have_run_the_last_trial_evaluates_the_best(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Any, is_companion: bool
) -> None:
    evaluated: list[str] = []
    monkeypatch.setattr(run_module, "run_worker", lambda *_, **__: RunSummary(ended))
    monkeypatch.setattr(
        run_module, "evaluate_best", lambda executor, *_: evaluated.append(executor.study.name)
    )
    with open_study(study(1, search_space={}), sqlite_url, tmp_path) as opened:
        if is_companion:
            config = opened.config.model_copy(
                update={"comparison": SimpleNamespace(model_dump=lambda **_: {})}
            )
            opened = replace(opened, config=config)
        assert run_study(opened, stop=Stop()).ended == ended
    expected = ended == "finished" and not is_companion
    assert evaluated == (["tiny"] if expected else [])
