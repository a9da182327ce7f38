"""Two processes that train together, against one that trains alone; how trials end, go on and agree.

What is looked at is computed by `rank_checks`, in two processes that are connected once, and in one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.command_line import ROOT, SUPPORT
from support.rank_checks import STEPS
from support.tiny import tiny_batch, tiny_model
from torch.distributed import TCPStore

from hpo.random_numbers import step_seed
from hpo.training import distributed
from hpo.training.distributed import GradientSum, add_up, decide, memory_agreed, rows_of_rank

pytestmark = pytest.mark.slow


class Found(NamedTuple):
    """What rank 0, rank 1 and a process alone saw."""

    first: dict[str, Any]
    second: dict[str, Any]
    alone: dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    together |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, str(SUPPORT / "rank_checks.py"), str(folder)]
    environments = [environment | together | {"RANK": str(rank)} for rank in range(2)]
    processes = [
        subprocess.Popen(command, env=each, stderr=subprocess.PIPE, text=True)
        for each in (*environments, environment)
    ]
    try:
        errors = [process.communicate(timeout=280)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    names = ("rank-0", "rank-1", "alone")
    return Found(*(json.loads((folder / f"{name}.json").read_text()) for name in names))


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        ("unequal micro-batches", 1e-5),
        ("frozen, checkpointed and uncertain", 1e-5),
        ("few labels", 1e-5),
        ("a last batch of one row", 1e-5),
        ("a first batch of one row", 2e-3),
        ("bf16-true", 2e-3),
        ("fallback", 2e-3),
    ],
)
def test_two_ranks_have_the_losses_of_one_process(found: Found, case: str, tolerance: float) -> None:
    first, second, alone = (each["losses"][case] for each in found)
    assert first["losses"] == second["losses"]
    assert first["weights"] == second["weights"], "all ranks take the same steps"
    assert first["losses"] == pytest.approx(alone["losses"], rel=tolerance)
    assert first["metrics"] == second["metrics"]
    for name in ("skipped", "num_tokens", "fallbacks", "scale"):
        assert first[name] == second[name] == alone[name]
    if case == "fallback":
        assert alone["fallbacks"] == 4
    if tolerance == 1e-5:
        assert first["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-6)


def test_a_weight_without_a_gradient_on_any_rank_has_none(found: Found) -> None:
    """As in one process, where weight decay does not reach it either."""
    assert found.first["gradients"] == found.second["gradients"] == [3.0, 2.0, None]


def test_gradients_that_overflow_in_one_rank_skip_the_step_of_all(found: Found) -> None:
    """As in one process, whose steps `test_grad_scaler` compares with plain arithmetic."""
    first, second, alone = (each["losses"]["overflow"] for each in found)
    for name in ("losses", "weights", "skipped", "scale"):
        assert first[name] == second[name]
    assert (first["skipped"], first["scale"]) == (alone["skipped"], alone["scale"]) == (1, 512)
    assert first["losses"][3] == pytest.approx(alone["losses"][3], rel=2e-3)
    assert first["losses"][2] > 1e30


def test_the_fp32_fallbacks_of_one_rank_end_the_training_of_all(found: Found) -> None:
    for each in found:
        error = each["losses"]["too many fallbacks"]["error"]
        assert error.startswith("more than 0 micro-batches of one epoch were not finite")


def test_logits_of_an_evaluation_are_those_of_one_process_bit_by_bit(found: Found) -> None:
    assert [each["evaluation"] for each in found] == [True, True, True]


def test_ranks_have_different_seeds_and_rank_0_that_of_a_process_alone() -> None:
    assert len({step_seed(42, 7, rank) for rank in range(3)}) == 3
    assert step_seed(42, 7, 0) == step_seed(42, 7)


def test_a_budget_of_seconds_ends_on_all_ranks_at_once(found: Found) -> None:
    assert found.first["seconds"] == found.second["seconds"]


def test_how_a_trial_ends_is_decided_once(found: Found) -> None:
    results = found.first["trials"]["results"]
    assert [outcome for outcome, *_ in results] == ["complete", "preempted", "complete", "pruned", "oom"]
    assert all(telemetry["num_ranks"] == 2 for *_, telemetry in results)
    assert "rank 1 ran out of memory" in results[-1][1]
    assert "lower `micro_batch_size`" in results[-1][1]


def test_a_trial_that_goes_on_has_equal_weights_on_all_ranks(found: Found) -> None:
    """Those of a trial that was never stopped."""
    whole, cut, resumed, *_ = found.first["trials"]["results"]
    assert "told to stop after step 3; checkpointed" in cut[1]
    assert resumed[3]["resumed_from_step"] == 3
    assert resumed[2] == whole[2]
    first, second = (each["trials"]["weights"] for each in found[:2])
    assert first == second
    assert first[:STEPS] == first[STEPS : 2 * STEPS]


def test_a_batch_is_shared_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_ranks in (2, 3, 5):
        monkeypatch.setattr(distributed, "world_size", lambda num_ranks=num_ranks: num_ranks)
        rows: list[int] = []
        for rank in range(num_ranks):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            rows += rows_of_rank(tiny_batch(9)).windows_B.tolist()
        assert rows == list(range(9))


def test_a_process_that_trains_alone_shares_nothing() -> None:
    batch, model, losses = tiny_batch(6), tiny_model(), torch.ones(2)
    assert rows_of_rank(batch).windows_B.tolist() == batch.windows_B.tolist()
    assert add_up(losses).tolist() == [1.0, 1.0]
    GradientSum(model)()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert decide(lambda: np.pi) == np.pi
    with pytest.raises(torch.OutOfMemoryError), memory_agreed(""):
        raise torch.OutOfMemoryError
