"""Opening a study: the checks before it is stored, and the precisions of this device."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import optuna
import pytest
import sqlalchemy as sa
from support.fake_nvml import FakeNvml
from support.tiny import CPU, GPU
from support.worker_process import begin, evaluate, run_trials, study, worker_on

from hpo.config.limits import ENERGY
from hpo.config.resolved_study import ResolvedStudy, resolve_study
from hpo.errors import DataError, InputError
from hpo.study.running import open_study as module
from hpo.study.running.open_study import OpenOptions, check_precisions, open_study
from hpo.study.running.stopping import WORKERS_ON_DEVICE
from hpo.study.running.worker import run_study
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


class FakeExecutor:
    """Stands for the executor of a study; its check raises `problem`."""

    problem: Exception | None = None
    made: list[FakeExecutor]

    def __init__(self, resolved: ResolvedStudy, *_: Any, checks_values: bool) -> None:
        self.resolved = resolved
        self.study, self.device, self.amp = resolved.config, resolved.device, resolved.amp
        self.num_checks, self.checks_values = 0, checks_values
        self.dataset = SimpleNamespace(splits={"train": range(48), "validation": range(24)})
        self.made.append(self)

    def check_study(self) -> None:
        self.num_checks += 1
        if self.problem:
            raise self.problem


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> type[FakeExecutor]:
    """The class of the executors; `made` has its objects."""
    FakeExecutor.made, FakeExecutor.problem = [], None
    monkeypatch.setattr(module, "build_executor", FakeExecutor)
    return FakeExecutor


def train(storage: Storage, config: Any) -> None:
    create_or_resume_study(storage, config)
    run_trials(storage, config, lambda trial: evaluate(storage, trial))


@pytest.mark.parametrize("has_database", [False, True])
def test_failed_check_leaves_no_study(
    sqlite_url: str, tmp_path: Path, executors: type[FakeExecutor], has_database: bool
) -> None:
    executors.problem = DataError("two classes of one name")
    if has_database:
        with open_storage(sqlite_url) as storage:
            create_or_resume_study(storage, study(name="other"))
    with pytest.raises(DataError), open_study(study(), sqlite_url, tmp_path):
        pass
    assert bool(list(tmp_path.glob("hpo.db*"))) == has_database
    if has_database:
        with open_storage(sqlite_url) as storage:
            assert not storage.has_study("tiny")


@pytest.mark.usefixtures("executors")
def test_joining_worker_makes_the_checkpoint_store_of_its_study_file(
    sqlite_url: str, tmp_path: Path, s3: str
) -> None:
    config = study(1, checkpoint={"location": s3})
    with open_study(config, sqlite_url, tmp_path, OpenOptions(resize=False, is_file=True)):
        assert fsspec.filesystem("s3").exists(f"{s3}/.hpo-artifacts")


@pytest.mark.parametrize(("begun", "num_checks"), [("no", 1), ("checkpointed", 0), ("ended", 0)])
def test_study_is_checked_until_a_trial_has_trained(
    storage: Storage, tmp_path: Path, executors: type[FakeExecutor], begun: str, num_checks: int
) -> None:
    create_or_resume_study(storage, study(1))
    if begun == "checkpointed":
        with worker_on(storage, study(1)) as worker:
            begin(worker)
        with storage.engine.begin() as connection:
            connection.execute(sa.update(claims).values(saved_step=40))
    if begun == "ended":
        train(storage, study(1))
    with open_study(study(2), storage.url, tmp_path) as opened:
        assert opened.stored.counts["open"] == (2 if begun == "no" else 1)
        assert opened.executor is executors.made[0]
    assert [executor.num_checks for executor in executors.made] == [num_checks]
    assert [executor.checks_values for executor in executors.made] == [bool(num_checks)]


@pytest.mark.usefixtures("executors")
def test_opening_reads_no_trials(storage: Storage, tmp_path: Path) -> None:
    def note(_: Any, __: Any, statement: str, *___: object) -> None:
        statements.append(statement)

    statements: list[str] = []
    train(storage, study(3))
    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        with open_study(study(8), storage.url, tmp_path) as started:
            assert started.stored.counts == {"open": 5, "running": 0, "done": 3}
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
    assert statements
    assert not [text for text in statements if "FROM trial_" in text or "evaluations.metrics" in text]


def test_parent_of_several_workers_checks_for_them(
    sqlite_url: str, tmp_path: Path, executors: type[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_study(study(), sqlite_url, tmp_path, OpenOptions(trials_run="in workers")) as opened:
        assert opened.executor is None
    monkeypatch.setenv(WORKERS_ON_DEVICE, "2")
    with open_study(study(), sqlite_url, tmp_path, OpenOptions(resize=False)) as opened:
        assert opened.executor is executors.made[1]
    assert [executor.num_checks for executor in executors.made] == [1, 0]


def test_study_deleted_in_the_dashboard_begins_anew(
    storage: Storage, tmp_path: Path, executors: type[FakeExecutor]
) -> None:
    train(storage, study(1))
    optuna.delete_study(study_name="tiny", storage=storage.optuna)
    with open_study(study(2), storage.url, tmp_path) as opened:
        assert (opened.stored.has_trained, opened.stored.counts["open"]) == (False, 2)
    assert [executor.num_checks for executor in executors.made] == [1]


def test_finished_study_loads_neither_data_nor_model(
    storage: Storage, tmp_path: Path, executors: type[FakeExecutor]
) -> None:
    train(storage, study(2))
    with open_study(study(2), storage.url, tmp_path) as opened:
        assert run_study(opened).outcomes == {}
    assert not executors.made


def test_trials_added_while_a_finished_study_is_opened(
    storage: Storage, tmp_path: Path, executors: type[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_stored(*args: Any) -> Any:
        stored = original(*args)
        create_or_resume_study(storage, study(3))
        return stored

    train(storage, study(1))
    original = module.read_stored
    monkeypatch.setattr(module, "read_stored", read_stored)
    with open_study(study(1), storage.url, tmp_path, OpenOptions(resize=False)) as opened:
        assert opened.config.n_trials == 3
        assert opened.executor is executors.made[0]
        assert opened.executor.cache is opened.storage


def searching(*names: str, **amp: Any) -> Any:
    return study(search_space={"fp_precision": {"type": "categorical", "choices": names}}, amp=amp)


@pytest.mark.usefixtures("executors")
@pytest.mark.parametrize("on_unsupported", ["skip", "prune", "fallback", "fail"])
def test_only_skip_leaves_out_searched_precisions(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_unsupported: str
) -> None:
    monkeypatch.setattr(module, "probe_device", lambda _: CPU)
    config = searching("fp32", "bf16", on_unsupported=on_unsupported)
    with open_study(config, sqlite_url, tmp_path) as opened:
        assert opened.left_out.keys() == ({"bf16"} if on_unsupported == "skip" else set())
        assert opened.lacking.keys() == {"bf16"}


def test_study_without_a_precision_for_this_device_is_not_made(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "probe_device", lambda _: CPU)
    config = searching("bf16", "tf32")
    with pytest.raises(InputError, match="it runs none of bf16"), open_study(config, sqlite_url, tmp_path):
        pass
    assert not list(tmp_path.glob("hpo.db*"))


@pytest.mark.parametrize(
    ("workers", "uuid", "reason"),
    [("1", "GPU-0", ""), ("2", "GPU-0", "other workers share this GPU"), ("1", "GPU-1", "Not Found")],
)
def test_energy_of_the_gpu_is_checked_before_the_study_is_made(
    sqlite_url: str,
    tmp_path: Path,
    executors: type[FakeExecutor],
    monkeypatch: pytest.MonkeyPatch,
    workers: str,
    uuid: str,
    reason: str,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({"GPU-0": lambda: 1}))
    monkeypatch.setattr(module, "probe_device", lambda _: replace(GPU, uuid=uuid))
    monkeypatch.setenv(WORKERS_ON_DEVICE, workers)
    config = study(objective={"metric": ENERGY, "direction": "minimize"})
    expected = pytest.raises(InputError, match=reason) if reason else nullcontext()
    with expected, open_study(config, sqlite_url, tmp_path) as opened:
        assert opened.executor is executors.made[0]
    assert bool(list(tmp_path.glob("hpo.db*"))) == (not reason)


@pytest.mark.parametrize("changes", [{"training": {"fp_precision": "tf32"}}, {"device": "cuda"}])
def test_study_for_other_machines_is_made(
    sqlite_url: str,
    tmp_path: Path,
    executors: type[FakeExecutor],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = study(search_space={}, **changes)
    with open_study(config, sqlite_url, tmp_path, OpenOptions(trials_run="elsewhere")) as opened:
        assert (opened.stored.counts["open"], opened.executor) == (8, None)
    assert [(executor.device.type, executor.num_checks) for executor in executors.made] == [("cpu", 1)]


@pytest.mark.parametrize("on_unsupported", ["skip", "prune", "fail", "fallback"])
@pytest.mark.parametrize(("preset", "precision"), [("advanced", "fp16"), ("ultra", "bf16")])
def test_precision_of_a_preset_must_run_here(on_unsupported: str, preset: str, precision: str) -> None:
    amp = {"preset": preset, "on_unsupported": on_unsupported}
    preset_study = resolve_study(study(search_space={}, amp=amp), CPU)
    if on_unsupported == "fallback":
        assert check_precisions(preset_study).keys() == {precision}
    else:
        with pytest.raises(InputError, match=f"it runs none of {precision}"):
            check_precisions(preset_study)
    fixed = study(search_space={}, training={"fp_precision": "fp32"}, amp=amp)
    assert check_precisions(resolve_study(fixed, CPU)) == {}
