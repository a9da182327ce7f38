"""Checkpoints: retention, resume keys, truncated files and failed writes."""

from __future__ import annotations

import re
from pathlib import Path
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
    assert {name: (bool(value.any()), value.dtype) for name, value in latest.weights.items()} == {
        "a": (False, torch.float32),
        "b": (False, torch.bfloat16),
    }


def test_kept_checkpoints(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(step, WEIGHTS, state={}, best={})
    store.wait()
    assert names_in(store.folder) == ["best-00000003", "step-00000002", "step-00000003"]
    left = store.folder / ".step-00000004.999.tmp"  # of a killed writer
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert store.latest().resume_key == "key"
    assert store.finish(3)
    assert names_in(store.folder) == ["best-00000003", "step-00000003"]
    store.save(2, WEIGHTS, best={})  # a resumed worker repeats an evaluation
    assert store.finish(2)
    assert not store.finish(5)
    assert names_in(store.folder) == ["best-00000002", "step-00000003"]


def test_checkpoint_of_another_worker_during_a_wait(tmp_path: Path) -> None:
    class Slow:
        def names(self, kind: str, _: str) -> list[str]:
            return [f"{kind}-00000009"]

        def fetch(self, path: Path, _: str) -> None:
            with CheckpointStore(path.parent, "key") as elsewhere:
                elsewhere.save(8, WEIGHTS, state={"step": 8})
            raise CheckpointError("it is not there")

    latest = CheckpointStore(tmp_path, "key", Slow()).latest()
    assert latest is not None
    assert latest.state == {"step": 8}


@pytest.mark.parametrize("has_links", [True, False])
def test_hard_link_to_the_best_weights(
    store: CheckpointStore, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", Mock(side_effect=OSError("Operation not permitted")))
    later = {name: value + 1 for name, value in WEIGHTS.items()}
    store.save(1, WEIGHTS, state={"kind": "step"}, best={"kind": "best"})
    store.save(2, later, state={"kind": "step"})
    store.wait()
    best, same, other = (store.folder / name for name in ("best-00000001", "step-00000001", "step-00000002"))
    inodes = [(path / "model.safetensors").stat().st_ino for path in (best, same, other)]
    assert len(set(inodes)) == (2 if has_links else 3)
    store.save(2, later, best={})  # drops the best of before
    store.wait()
    assert [read_checkpoint(path).state for path in (same, other)] == [{"kind": "step"}] * 2
    for path, weights in ((same, WEIGHTS), (other, later)):
        assert all(torch.equal(value, weights[name]) for name, value in read_checkpoint(path).weights.items())


@pytest.mark.parametrize(("name", "kept"), [("model.safetensors", 0.5), ("state.pt", 0.5), ("state.pt", 0)])
def test_truncated_checkpoint(store: CheckpointStore, name: str, kept: float) -> None:
    for step in (1, 2):
        store.save(step, WEIGHTS, state={"step": step})
    store.wait()
    path = store.folder / "step-00000002" / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match="step-00000002"):
        read_checkpoint(path.parent)
    assert store.latest().state == {"step": 1}


class Payload:
    """An object for pickle only."""


def test_checkpoint_with_code(store: CheckpointStore) -> None:
    store.save(1, WEIGHTS, state={"payload": Payload()})
    store.wait()
    with pytest.raises(CheckpointError, match=r"[Ww]eights.only"):
        read_checkpoint(store.folder / "step-00000001")


def test_full_disk(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(1, WEIGHTS, state={"step": 1})
    store.wait()
    with monkeypatch.context() as patch:
        fill_disk(patch)
        for step in (2, 3):
            store.save(step, WEIGHTS, state={"step": step})
        store.wait()
    assert names_in(store.folder) == ["step-00000001"]
    assert store.latest().state == {"step": 1}
    assert len(store.problems) == 1
    assert re.search(r"trial-00000 could not be written: .*No space left.*Free some space", store.problems[0])
    store.save(4, WEIGHTS, state={"step": 4})
    store.wait()
    assert store.latest().state == {"step": 4}


@pytest.mark.parametrize("end", [ZeroDivisionError, KeyboardInterrupt, Preempted])
def test_failed_write_raises_only_for_a_preemption(
    store: CheckpointStore, end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)

    def save_and_end() -> None:
        with store:
            store.save(2, WEIGHTS, state={"step": 2})
            raise end

    with pytest.raises(CheckpointError if end is Preempted else end):
        save_and_end()
    assert len(store.problems) == 1


def test_late_worker_keeps_newer_checkpoints(tmp_path: Path) -> None:
    late, new = (CheckpointStore(tmp_path, "key") for _ in range(2))
    for store, steps in ((late, (10, 20)), (new, (30, 40, 50)), (late, (25, 35))):
        for step in steps:
            store.save(step, WEIGHTS, state={"step": step}, best={})
        store.wait()
    assert new.latest().state == {"step": 50}
    assert {"step-00000040", "step-00000050", "best-00000050"} <= set(names_in(tmp_path))


def test_checkpoints_of_several_keys(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, "A") as before:
        before.save(500, WEIGHTS, state={"step": 500}, best={"of": "A"})
    for step in (30, 60, 90):
        with CheckpointStore(tmp_path, "B") as now:
            now.save(step, WEIGHTS, state={"step": step}, best={"of": "B"} if step == 30 else None)
        assert CheckpointStore(tmp_path, "B").latest().state == {"step": step}
    back = CheckpointStore(tmp_path, "A")
    assert back.latest().state == {"step": 500}
    assert back.best().state == {"of": "A"}
    of_none = CheckpointStore(tmp_path, "C")
    assert (of_none.latest(), of_none.best()) == (None, None)
    now.finish(0)
    assert names_in(tmp_path) == ["best-00000030", "step-00000090"]
    assert best_checkpoint(tmp_path).state == {"of": "B"}
