"""Two ranks against one process: losses, ends of trials, resumes. `support/rank_checks.py` computes them."""

import json
import subprocess
import sys
from functools import partial
from typing import Any, NamedTuple

import pytest
from support.command_line import ROOT, SUPPORT
from support.rank_checks import STEPS
from torch.distributed import TCPStore

pytestmark = pytest.mark.slow


class Found(NamedTuple):
    """Results of rank 0, rank 1 and a process alone."""

    first: Any
    second: Any
    alone: Any


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    together = alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    together |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, str(SUPPORT / "rank_checks.py"), str(folder)]
    environments = (*(together | {"RANK": str(rank)} for rank in range(2)), alone)
    start = partial(subprocess.Popen, command, stderr=subprocess.PIPE, text=True)
    processes = [start(env=environment) for environment in environments]
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
def test_losses_equal_one_process(found: Found, case: str, tolerance: float) -> None:
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


def test_overflow_on_one_rank_skips_the_step_of_all(found: Found) -> None:
    first, second, alone = (each["losses"]["overflow"] for each in found)
    for name in ("losses", "weights", "skipped", "scale"):
        assert first[name] == second[name]
    assert (first["skipped"], first["scale"]) == (alone["skipped"], alone["scale"]) == (1, 512)
    assert first["losses"][3] == pytest.approx(alone["losses"][3], rel=2e-3)
    assert first["losses"][2] > 1e30


def test_fp32_fallbacks_of_one_rank_end_all(found: Found) -> None:
    for each in found:
        error = each["losses"]["too many fallbacks"]["error"]
        assert error.startswith("more than 0 micro-batches of one epoch were not finite")


def test_gradients_evaluations_and_seconds_of_all_ranks(found: Found) -> None:
    assert found.first["gradients"] == found.second["gradients"] == [3.0, 2.0, None]
    assert [each["evaluation"] for each in found] == [True, True, True]
    assert found.first["seconds"] == found.second["seconds"]


def test_ends_of_trials(found: Found) -> None:
    results = found.first["trials"]["results"]
    assert [outcome for outcome, *_ in results] == ["complete", "preempted", "complete", "pruned", "oom"]
    assert all(telemetry["num_ranks"] == 2 for *_, telemetry in results)
    assert "rank 1 ran out of memory" in results[-1][1]
    assert "lower `micro_batch_size`" in results[-1][1]


def test_resumed_trial_on_all_ranks(found: Found) -> None:
    whole, cut, resumed, *_ = found.first["trials"]["results"]
    assert "told to stop after step 3; checkpointed" in cut[1]
    assert resumed[3]["resumed_from_step"] == 3
    assert resumed[2] == whole[2]
    first, second = (each["trials"]["weights"] for each in found[:2])
    assert first == second
    assert first[:STEPS] == first[STEPS : 2 * STEPS]
