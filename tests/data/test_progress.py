from __future__ import annotations

import logging
from pathlib import Path

import pytest
from jsonl_sets import load_set, write_set
from tiny_tokenizers import tiny_tokenizer

from hpo.data.progress import logged
from hpo.data.token_cache import load_tokenized
from hpo.data.tokenized_split import Windowing


def test_progress_is_told_about_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    seconds = iter([0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 21.0, 23.0])
    items = logged(range(7), "work", 20_000, size=lambda _: 2000, clock=lambda: next(seconds))
    assert list(items) == list(range(7))
    assert caplog.messages == ["work", "work: 30 % of 20,000", "work: 70 % of 20,000"]


def test_reading_and_tokenising_are_told_and_what_is_cached_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    rows = [{"id": f"{i}", "text": "a b", "labels": {"tone": "xy"[i % 2]}} for i in range(6)]
    tasks = {"tone": {"kind": "single_label"}}
    dataset = load_set(write_set(tmp_path, tasks, train=rows[:4], validation=rows[4:]))
    assert caplog.messages == [
        f"reading the classes of {tmp_path / 'train.jsonl'}",
        f"reading {tmp_path / 'train.jsonl'}",
        f"reading {tmp_path / 'validation.jsonl'}",
    ]
    caplog.clear()
    for _ in range(2):
        load_tokenized(dataset, "train", tiny_tokenizer("wordpiece"), Windowing(16), tmp_path / "cache")
    assert caplog.messages == ["tokenising 4 texts of the train split (max_length 16)"]
