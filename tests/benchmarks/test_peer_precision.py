from __future__ import annotations

from pathlib import Path

import pytest
from peer_precision import costs
from peer_searches import (
    DTYPES,
    WORKLOAD,
    Search,
    Trial,
    run_search,
    write_bf16_checkpoint,
)
from peers import missing
from workload import run_apart, write_workload

NUM_TRIALS, SEED = 4, 0
NUM_STEPS = WORKLOAD.num_train // WORKLOAD.batch_size


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_workload(WORKLOAD, folder)
    return folder


def dtypes_of(trials: list[Trial]) -> dict[str, set[str]]:
    return {trial.asked: trial.seen.dtypes for trial in trials}


def test_observed_precision_of_a_sound_model_equals_the_record(rows: Path) -> None:
    trials = run_search("hpo", Search(rows))
    assert dtypes_of(trials) == {precision: {str(dtype)} for precision, dtype in DTYPES.items()}
    for trial in trials:
        assert (trial.state, trial.seen.num_steps, trial.seen.trained_nan) == ("COMPLETE", NUM_STEPS, False)
        reduced = {"off"} if trial.asked == "fp32" else trial.seen.dtypes
        assert trial.seen.autocast == reduced
        assert trial.is_true
        assert f"effective {trial.asked}" in trial.noted


def test_a_checkpoint_in_bf16_is_fp32_weights_in_ours_and_bf16_ones_in_plain_transformers(rows: Path) -> None:
    """transformers loads weights in the dtype that they are stored in."""
    encoder = write_bf16_checkpoint(rows / "encoder")
    for name, is_true in (("hpo", True), ("plain", False)):
        (trial,) = run_search(name, Search(rows, 1, encoder=encoder, precisions=("fp32",)))
        assert trial.seen.dtypes == {"torch.float32" if is_true else "torch.bfloat16"}
        assert trial.is_true == is_true


def test_a_broken_precision_trains_in_plain_optuna_and_not_in_ours(rows: Path) -> None:
    broken, search = "bf16", Search(rows, NUM_TRIALS, SEED, "bf16")
    for name, end in (("plain-accuracy", "COMPLETE"), ("hpo", "PRUNED")):
        trials = run_search(name, search)
        asked = [trial for trial in trials if trial.asked == broken]
        assert len(trials) == NUM_TRIALS
        assert asked
        assert {trial.state for trial in trials if trial.asked != broken} == {"COMPLETE"}
        assert {trial.state for trial in asked} == {end}
        trained, lost = (0, len(asked)) if name == "hpo" else (len(asked), 0)
        assert costs(trials, broken) == (len(asked), trained, lost, trained, 0, NUM_STEPS * trained)
        dtypes = {frozenset(trial.seen.dtypes) for trial in asked if trial.seen.num_steps}
        assert dtypes == ({frozenset({str(DTYPES[broken])})} if trained else set())
    assert all("incompatible" in trial.noted for trial in asked)


@pytest.mark.parametrize(
    ("name", "ran"),
    [
        pytest.param(
            "trainer-fp32", {"fp32": "fp32", "bf16": "fp32", "fp16": "fp32"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "trainer-bf16", {"fp32": "bf16", "bf16": "bf16", "fp16": "bf16"}, marks=pytest.mark.slow
        ),
        ("lightning", {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}),
    ],
)
def test_peers_record_another_precision_than_they_run(rows: Path, name: str, ran: dict[str, str]) -> None:
    if package := missing(name):
        pytest.skip(f"{package} is not installed: `make bench` does it")
    trials = run_apart(run_search, name, Search(rows))
    assert dtypes_of(trials) == {asked: {str(DTYPES[precision])} for asked, precision in ran.items()}
    assert [trial.is_true for trial in trials] == [ran[trial.asked] == trial.asked for trial in trials]
