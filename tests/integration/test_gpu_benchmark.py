"""The benchmark for GPUs, as far as a CPU can tell: every table is there, and what fails is a row."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command_line import ROOT

FOLDER = ROOT / "tests" / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("gpu")


def tables(gpu: Any, *arguments: str) -> list[list[list[str]]]:
    """The cells of each table that the script prints, without its head."""
    with (
        redirect_stdout(StringIO()) as out,
        mock.patch.object(sys, "argv", ["gpu.py", "--device", "cpu", "--quick", *arguments]),
    ):
        gpu.main()
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]]
        for block in out.getvalue().strip().split("\n\n")[1:]
    ]


@pytest.mark.slow
def test_a_quick_run_on_a_cpu(gpu: Any) -> None:
    eager, sharing = tables(gpu)
    ours, peer = eager
    assert ours[:4] == ["hpo", "tiny", "fp32", "none"]
    assert peer[:4] == ["Trainer", "tiny", "fp32", "none"]
    assert re.fullmatch(r"[\d,]+", ours[4])
    assert re.fullmatch(r"\d+\.\d\d GiB", ours[6])
    assert [row[:2] for row in sharing] == [["1", "2"], ["2", "2"]]
    assert all(re.fullmatch(r"[\d,]+", row[2]) for row in sharing)
    assert sharing[0][3] == "1.00x"


def test_what_the_budget_does_not_reach_is_a_row(gpu: Any) -> None:
    eager, sharing = tables(gpu, "--budget", "0.001")
    assert len(eager) == len(sharing) == 2
    assert all("out of time" in row for row in eager + sharing)


def test_what_fails_is_a_row_with_its_reason(gpu: Any, tmp_path: Path) -> None:
    cell = gpu.Cell("hpo", "tiny", "tf32", "none")
    gpu.write_workload(gpu.QUICK["tiny"], tmp_path / "tiny")
    (measured,) = gpu.measure(tmp_path, "cpu", [cell])
    assert measured["failed"].startswith("unsupported: `tf32` needs CUDA")
    assert "| hpo | tiny | tf32 | none | unsupported: `tf32` needs" in gpu.training_row(cell, measured)
    (measured,) = gpu.measure(tmp_path / "nothing", "cpu", [cell])
    assert "FileNotFoundError" in measured["failed"]
