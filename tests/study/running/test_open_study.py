"""Opening a study: the checks before it is stored, and the precisions of this device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from support.tiny import CPU
from support.worker_process import begin, evaluate, run_trials, study, worker_on

from hpo.config.resolved_study import ResolvedStudy, resolve_study
from hpo.errors import InputError
from hpo.study.running import open_study as module
from hpo.study.running.open_study import check_precisions, open_study
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study


class FakeExecutor:
    """Stands for the executor of a study."""

    made: list[FakeExecutor]

    def __init__(self, resolved: ResolvedStudy, *_: Any, checks_values: bool) -> None:
        self.resolved = resolved
        self.study, self.device, self.amp = resolved.config, resolved.device, resolved.amp
        self.num_checks, self.checks_values = 0, checks_values
        self.dataset = SimpleNamespace(splits={"train": range(48), "validation": range(24)})
        self.made.append(self)

    def check_study(self) -> None:
        self.num_checks += 1


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> type[FakeExecutor]:
    """The class of the executors; `made` has its objects."""
    FakeExecutor.made = []
    monkeypatch.setattr(module, "build_executor", FakeExecutor)
    return FakeExecutor


def train(storage: Storage, config: Any) -> None:
    create_or_resume_study(storage, config)
    run_trials(storage, config, lambda trial: evaluate(storage, trial))


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
