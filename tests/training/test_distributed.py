"""Two processes that train together, against one that trains alone; each way in which a trial ends, on both.

What is looked at is computed by `rank_checks`, in two processes that are connected once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import ROOT
from rank_checks import TRIALS
from tiny import tiny_batch, tiny_model
from torch.distributed import TCPStore

from hpo.training import distributed
from hpo.training.distributed import ONE_RANK, ConnectedRanks

pytestmark = pytest.mark.slow

Found = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What rank 0 and rank 1 saw."""
    folder = tmp_path_factory.mktemp("ranks")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", **places}
    command = [sys.executable, str(ROOT / "tests" / "rank_checks.py"), str(folder)]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=280)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    first, second = (json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2))
    return first, second


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        ("plain", 1e-5),
        ("micro-batches", 1e-5),
        ("unequal", 1e-5),
        ("uncertainty", 1e-5),
        ("few labels", 1e-5),
        ("a last batch of one row", 1e-5),
        ("bf16-true", 2e-3),
        ("bf16-true, stochastic", 2e-3),
        ("fp16 with skipped steps", 2e-3),
    ],
)
def test_two_ranks_have_the_losses_of_one_process(found: Found, case: str, tolerance: float) -> None:
    first, second = (each["losses"][case]["together"] for each in found)
    alone = found[0]["losses"][case]["alone"]
    assert first["losses"] == second["losses"]
    assert first["weights"] == second["weights"], "all ranks take the same steps"
    assert len(alone["losses"]) == 6
    assert first["losses"] == pytest.approx(alone["losses"], rel=tolerance)
    assert first["metrics"] == second["metrics"]
    for name in ("skipped", "num_tokens"):
        assert first[name] == second[name] == alone[name]
    if case.startswith("fp16"):
        assert alone["skipped"] > 0
    if tolerance == 1e-5:
        for task, metrics in alone["metrics"].items():
            assert first["metrics"][task] == pytest.approx(metrics, rel=1e-4)


@pytest.mark.parametrize("case", ["plain", "micro-batches", "bf16-true"])
def test_rank_0_has_the_numeric_telemetry_of_one_process(found: Found, case: str) -> None:
    first, second = (each["losses"][case]["together"]["numerics"] for each in found)
    alone = found[0]["losses"][case]["alone"]["numerics"]
    assert second is None
    assert first["parts"].keys() == alone["parts"].keys()
    for name, share in alone["all"].items():
        assert first["all"][name] == pytest.approx(share, rel=0.05, abs=1e-3)


def test_logits_of_an_evaluation_are_those_of_one_process_bit_by_bit(found: Found) -> None:
    assert [each["evaluation"] for each in found] == [True, True]


def test_with_dropout_each_rank_has_masks_of_its_own_and_a_run_can_be_repeated(found: Found) -> None:
    (one, again), (other, _) = (each["losses"]["dropout"]["together"] for each in found)
    assert one["losses"] == again["losses"] == other["losses"]
    assert one["weights"] == other["weights"]
    ranks = [ConnectedRanks.__new__(ConnectedRanks) for _ in range(3)]
    for number, each in enumerate(ranks):
        each.rank = number
    assert len({each.seed(42) for each in ranks}) == 3
    assert ranks[0].seed(42) == 42


def test_a_budget_of_seconds_ends_on_all_ranks_at_once(found: Found) -> None:
    first, second = (each["losses"]["seconds"] for each in found)
    for each in (first, second):
        del each["state"]["evaluation_seconds"]
    assert first == second
    assert first["state"]["num_evaluations"] == 3


def test_memory_that_one_rank_lacks_halves_the_micro_batch_of_all(found: Found) -> None:
    plain = found[0]["losses"]["plain"]["alone"]["losses"]
    for each in found:
        halved = each["losses"]["memory"]["together"]
        assert halved["micro_batch_size"] == 2
        assert halved["losses"] == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_fp32_fallbacks_of_one_rank_count_for_all(found: Found, rank: int) -> None:
    for each in found:
        seen = each["losses"][f"fallback in {rank}"]
        assert seen["together"]["fallbacks"] == 1
        assert np.isfinite(seen["together"]["losses"]).all()
        assert seen["too many"].startswith("more than 0 micro-batches of one epoch were not finite")


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_that_overflow_in_one_rank_skip_the_step_of_all(found: Found, rank: int) -> None:
    """As in one process, whose steps `test_grad_scaler` compares with plain arithmetic."""
    first, second = (each["losses"][f"overflow in {rank}"] for each in found)
    for name in ("losses", "weights", "metrics", "skipped", "scale"):
        assert first["together"][name] == second["together"][name]
    for name in ("skipped", "scale"):
        assert first["together"][name] == first["alone"][name]
    assert first["together"]["skipped"] == 1
    assert first["together"]["scale"] == 512
    assert first["together"]["weights"] == pytest.approx(first["alone"]["weights"], rel=1e-4)
    losses, alone = (first[name]["losses"] for name in ("together", "alone"))
    assert losses[3:] == pytest.approx(alone[3:], rel=2e-3)
    assert losses[2] > 1e30


ENDS: Mapping[str, tuple[str, str]] = {
    "": ("complete", ""),
    "raises/1": ("failed", "RankError: rank 1 raised ValueError: a bug"),
    "raises/0": ("failed", "ValueError: a bug"),
    "nan/1": ("nonfinite", "the loss was not finite in 3 steps in a row"),
    "nan/0": ("nonfinite", "the loss was not finite in 3 steps in a row"),
    "memory/1": ("oom", "does not fit into memory"),
    "memory/0": ("oom", "does not fit into memory"),
    "memory in the update/1": ("oom", "no memory is left"),
    "memory in the update/0": ("oom", "no memory is left"),
    "raises in the sum/1": ("failed", "RankError: rank 1 raised ValueError: a bug"),
    "memory in the sum/1": ("oom", "does not fit into memory"),
    "memory in the sum/0": ("oom", "does not fit into memory"),
    "raises in an evaluation/0": ("failed", "ValueError: a bug"),
    "raises in the retry/1": ("failed", "RankError: rank 1 raised ValueError: a bug"),
    "pruned/0": ("pruned", "the pruner stopped it"),
    "preempted/1": ("preempted", "told to stop after step 1; checkpointed"),
    "preempted/0": ("preempted", "told to stop after step 2; checkpointed"),
    "goes on": ("complete", ""),
}


@pytest.mark.parametrize("case", TRIALS)
def test_how_a_trial_ends_is_decided_once(found: Found, case: str) -> None:
    """Whichever rank it happens on; the trial after it is none the worse for it."""
    outcome, reason, trace, telemetry = next(rest for name, *rest in found[0]["trials"] if name == case)
    assert outcome == ENDS[case][0], reason
    assert ENDS[case][1] in reason
    assert telemetry["num_ranks"] == 2
    if case.startswith("raises"):
        assert "in fail\n" in trace, "where it was raised"
    if case == "goes on":
        assert telemetry["resumed_from_step"] == 2


def test_a_batch_is_shared_among_the_ranks_in_as_many_parts() -> None:
    for num_ranks in (2, 3, 5):
        for size in (1, 2, 4, 9):
            batch = tiny_batch(9)
            parts = []
            for rank in range(num_ranks):
                ranks = ConnectedRanks.__new__(ConnectedRanks)
                ranks.rank, ranks.world_size = rank, num_ranks
                parts.append(ranks.micro_batches(batch, size))
            assert len({len(each) for each in parts}) == 1
            rows = [int(row) for each in parts for part in each for row in part.windows_B]
            assert rows == list(range(9))
            assert max(len(part.windows_B) for each in parts for part in each) <= size


def test_a_process_that_trains_alone_shares_nothing() -> None:
    batch, model = tiny_batch(6), tiny_model()
    assert [len(part.windows_B) for part in ONE_RANK.micro_batches(batch, 4)] == [4, 2]
    losses = torch.ones(2)
    ONE_RANK.sum_gradients(model, losses)
    assert losses.tolist() == [1.0, 1.0]
    assert all(parameter.grad is None for parameter in model.parameters())
    with ONE_RANK.together(), pytest.raises(ValueError, match="a bug"), ONE_RANK.together():
        raise ValueError("a bug")


def test_a_rank_is_lost_when_nothing_of_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case: what it says each second, whether it is waited for, and after how long it is given up."""
    now = 1000.0
    monkeypatch.setattr(distributed, "time", SimpleNamespace(monotonic=lambda: now))
    cases: list[tuple[Callable[[int], str], bool, float | None]] = [
        (lambda n: f"{n} 7 0 30.0", True, 32),  # lives, and hangs
        (lambda n: f"{n} 7 {n // 20} 30.0", True, None),  # evaluates
        (lambda n: f"{n} {7 + n // 20} 0 30.0", True, None),  # is behind, and catches up
        (lambda n: f"{n} 7 0 0.0", True, None),  # talks to the database
        (lambda n: f"{n} 7 0 30.0", False, None),  # nobody waits for it
        (lambda _: "1 7 0 30.0", False, 17),  # is silent
        (lambda n: "ended" if n == 5 else f"{n} 7 0 0.0", False, 5),
    ]
    for sign, is_waited_for, lost_after in cases:
        began = now
        other = distributed._Other(now)
        found = None
        for second in range(1, 60):
            now += 1
            if other.problem(sign(second), 99, began if is_waited_for else None):
                found = second
                break
        assert found == lost_after
