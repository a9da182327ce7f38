"""Checkpoints: retention, resume keys, truncated files and failed writes."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hpo.errors import CheckpointError, Preempted
from hpo.training.checkpoint import CheckpointStore, best_checkpoint, read_checkpoint

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "trial-00000", "key")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_steps(store: CheckpointStore, steps: Iterable[int], *, best: bool = False) -> None:
    for step in steps:
        store.save(step, WEIGHTS, state={"step": step}, best={} if best else None)
    store.wait()


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("hpo.training.checkpoint.torch.save", full)


def test_save_copies_weights_and_state(store: CheckpointStore) -> None:
    weights = {"a": torch.zeros(1000, 1000), "b": torch.zeros(2, dtype=torch.bfloat16)}
    moment = torch.zeros(1000, 1000)
    store.save(3, weights, state={"step": 3, "optimizer": {"state": [{"moment": moment}]}})
    for tensor in (*weights.values(), moment):
        tensor.fill_(1.0)
    store.wait()
    latest = store.latest()
    assert latest.state["step"] == 3
    assert latest.state["optimizer"]["state"][0]["moment"].eq(0).all()
    kept = {name: (bool(value.any()), value.dtype) for name, value in latest.weights.items()}
    assert kept == {"a": (False, torch.float32), "b": (False, torch.bfloat16)}


def test_kept_checkpoints(store: CheckpointStore) -> None:
    save_steps(store, (1, 2, 3), best=True)
    assert names_in(store.folder) == ["best-00000003", "step-00000002", "step-00000003"]
    left = store.folder / ".step-00000004.999.tmp"  # of a killed writer
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert store.latest().resume_key == "key"
    assert store.finish(3)
    assert names_in(store.folder) == ["best-00000003", "step-00000003"]
    store.save(2, WEIGHTS, best={})  # a resumed worker repeats an evaluation
    assert (store.finish(2), store.finish(5)) == (True, False)
    assert names_in(store.folder) == ["best-00000002", "step-00000003"]


def test_checkpoint_of_another_worker_during_a_wait(tmp_path: Path) -> None:
    class Slow:
        def names(self, kind: str, _: str) -> list[str]:
            return [f"{kind}-00000009"]

        def fetch(self, path: Path, _: str) -> None:
            with CheckpointStore(path.parent, "key") as elsewhere:
                elsewhere.save(8, WEIGHTS, state={"step": 8})
            raise CheckpointError("it is not there")

    assert CheckpointStore(tmp_path, "key", Slow()).latest().state == {"step": 8}


@pytest.mark.parametrize("has_links", [True, False])
def test_hard_link_to_the_best_weights(store: CheckpointStore, has_links: bool, monkeypatch: Any) -> None:
    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", Mock(side_effect=OSError("Operation not permitted")))
    save_steps(store, [1], best=True)
    best, same = (store.folder / name / "model.safetensors" for name in ("best-00000001", "step-00000001"))
    assert (best.stat().st_ino == same.stat().st_ino) == has_links
    store.save(2, {name: value + 1 for name, value in WEIGHTS.items()}, best={})  # drops the best of before
    store.wait()
    left = read_checkpoint(same.parent)
    assert left.state == {"step": 1}
    assert all(torch.equal(value, WEIGHTS[name]) for name, value in left.weights.items())


@pytest.mark.parametrize(("name", "kept"), [("model.safetensors", 0.5), ("state.pt", 0.5), ("state.pt", 0)])
def test_truncated_checkpoint(store: CheckpointStore, name: str, kept: float) -> None:
    save_steps(store, (1, 2))
    path = store.folder / "step-00000002" / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match="step-00000002"):
        read_checkpoint(path.parent)
    assert store.latest().state == {"step": 1}


def test_checkpoint_with_code(store: CheckpointStore) -> None:
    store.save(1, WEIGHTS, state={"payload": store.folder})
    store.wait()
    with pytest.raises(CheckpointError, match=r"[Ww]eights.only"):
        read_checkpoint(store.folder / "step-00000001")


def test_full_disk(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(store, [1])
    with monkeypatch.context() as patch:
        fill_disk(patch)
        save_steps(store, (2, 3))
    assert names_in(store.folder) == ["step-00000001"]
    (problem,) = store.problems
    assert re.search(r"trial-00000 could not be written: .*No space left.*Free some space", problem)
    save_steps(store, [4])
    assert store.latest().state == {"step": 4}


@pytest.mark.parametrize("end", [KeyboardInterrupt, Preempted])
def test_failed_write_raises_at_a_preemption(store: CheckpointStore, end: Any, monkeypatch: Any) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(CheckpointError if end is Preempted else end), store:  # noqa: PT012
        store.save(2, WEIGHTS, state={"step": 2})
        raise end
    assert len(store.problems) == 1


def test_late_worker_keeps_newer_checkpoints(tmp_path: Path) -> None:
    late, new = (CheckpointStore(tmp_path, "key") for _ in range(2))
    for store, steps in ((late, (10, 20)), (new, (30, 40, 50)), (late, (25, 35))):
        save_steps(store, steps, best=True)
    assert new.latest().state == {"step": 50}
    assert {"step-00000040", "step-00000050", "best-00000050"} <= set(names_in(tmp_path))


def test_checkpoints_of_several_keys(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, "A") as before:
        before.save(500, WEIGHTS, state={"step": 500}, best={"of": "A"})
    for step in (30, 60, 90):
        with CheckpointStore(tmp_path, "B") as now:
            now.save(step, WEIGHTS, state={"step": step}, best={"of": "B"} if step == 30 else None)
        assert CheckpointStore(tmp_path, "B").latest().state == {"step": step}
    back, of_none = CheckpointStore(tmp_path, "A"), CheckpointStore(tmp_path, "C")
    assert (back.latest().state, back.best().state) == ({"step": 500}, {"of": "A"})
    assert (of_none.latest(), of_none.best()) == (None, None)
    now.finish(0)
    assert names_in(tmp_path) == ["best-00000030", "step-00000090"]
    assert best_checkpoint(tmp_path).state == {"of": "B"}
