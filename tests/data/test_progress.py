from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tiny_tokenizers import tiny_tokenizer

from hpo.config.data_config import DataConfig
from hpo.data.dataset import load_data
from hpo.data.progress import ProgressLog
from hpo.data.token_cache import load_tokenized
from hpo.data.tokenized_split import Windowing


@pytest.mark.parametrize(
    ("total", "lines"),
    [
        (20_000, ["work: 30 % of 20,000", "work: 70 % of 20,000"]),
        (None, ["work: 6,000 rows so far", "work: 14,000 rows so far"]),
    ],
)
def test_progress_is_told_about_every_ten_seconds(
    total: int | None, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    seconds = iter([0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 21.0, 23.0])
    progress = ProgressLog("work", total, clock=lambda: next(seconds))
    for _ in range(7):
        progress.advance(2000)
    assert caplog.messages == ["work", *lines]


def test_reading_and_tokenising_are_told_and_what_is_cached_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    for split in ("train", "validation"):
        rows = [{"id": f"{split}{i}", "text": "a b", "labels": {"tone": "xy"[i % 2]}} for i in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks.json").write_text(json.dumps({"tone": {"kind": "single_label"}}))
    dataset = load_data(DataConfig.model_validate({"source": "jsonl", "path": str(tmp_path)}))
    assert caplog.messages == [
        f"reading the classes of {tmp_path / 'train.jsonl'}",
        f"reading {tmp_path / 'train.jsonl'}",
        f"reading {tmp_path / 'validation.jsonl'}",
    ]
    caplog.clear()
    for _ in range(2):
        load_tokenized(dataset, "train", tiny_tokenizer("wordpiece"), Windowing(16), tmp_path / "cache")
    assert caplog.messages == ["tokenising 4 texts of the train split (max_length 16)"]
