import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support import jsonl_sets
from support.tiny_tokenizers import tiny_tokenizer, tokenize_split

import hpo.data.token_cache
from hpo.data.dataset import DataSet
from hpo.data.token_cache import load_tokenized
from hpo.data.tokenization import tokenize_chunks
from hpo.tasks.tokenized_split import TokenizedSplit, Windowing

SYNTHETIC = {"source": "synthetic", "synthetic": {"num_train": 40, "num_validation": 20, "num_test": 1}}
WINDOWED = {"long_text": "window"}


@pytest.fixture
def dataset() -> DataSet:
    return jsonl_sets.load(**SYNTHETIC)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Count the tokenised splits."""
    counted = Mock(side_effect=tokenize_chunks)
    monkeypatch.setattr(hpo.data.token_cache, "tokenize_chunks", counted)
    return counted


def load(dataset: DataSet, cache: Path, **settings: Any) -> TokenizedSplit:
    """Load tokens; `settings` are those of the windows, or `split`, `family` of the tokenizer and `data`."""
    dataset, split = replace(dataset, **settings.pop("data", {})), settings.pop("split", "train")
    tokenizer = tiny_tokenizer(settings.pop("family", "wordpiece"))
    return load_tokenized(dataset, split, tokenizer, replace(Windowing(64), **settings), cache)


def directly(dataset: DataSet, windowing: Windowing) -> TokenizedSplit:
    return tokenize_split(dataset.splits["train"], dataset.tasks, tiny_tokenizer("wordpiece"), windowing)


def assert_same(one: TokenizedSplit, other: TokenizedSplit) -> None:
    np.testing.assert_equal(asdict(one), asdict(other))


def test_a_split_is_tokenised_once_and_then_mapped(dataset: DataSet, tmp_path: Path, made: Mock) -> None:
    direct = directly(dataset, Windowing(64))
    for _ in range(2):
        cached = load(dataset, tmp_path)
        assert_same(cached, direct)
        assert isinstance(cached.input_ids_T.base, np.memmap)
        assert cached.examples is dataset.splits["train"]
    assert made.call_count == 1
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("long_text", ["truncate", "window"])
def test_split_written_in_chunks(long_text: str, dataset: DataSet, tmp_path: Path, monkeypatch: Any) -> None:
    whole = directly(dataset, Windowing(32, long_text, 8))
    monkeypatch.setattr("hpo.data.tokenization._CHUNK", 7)
    assert_same(load(dataset, tmp_path, max_length=32, long_text=long_text, stride=8), whole)
    assert sum(whole.num_lost_spans.values()) > 0


@pytest.mark.parametrize(
    ("first", "second", "times"),
    [
        ({}, {"split": "validation"}, 2),
        ({}, WINDOWED, 2),
        ({**WINDOWED, "stride": 6}, {**WINDOWED, "stride": 7}, 2),
        ({"stride": 6}, {"stride": 7}, 1),
        ({"family": "byte_level"}, {"family": "byte_level_with_spaces"}, 2),
        ({}, {"data": {"fingerprint": "other"}}, 2),
        ({}, {"data": {"tasks": ()}}, 2),
    ],
)
def test_every_input_of_the_tokens_makes_another_cache(
    first: Any, second: Any, times: int, dataset: DataSet, tmp_path: Path, made: Mock
) -> None:
    load(dataset, tmp_path, **first)
    load(dataset, tmp_path, **second)
    assert made.call_count == times


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("owned_T.npy", lambda path: path.write_bytes(b"")),
        ("target.severity.npy", Path.unlink),
        ("char_end_T.npy", lambda path: path.write_bytes(b"more" + path.read_bytes())),
        ("contents.json", lambda path: path.write_bytes(path.read_bytes()[:-9])),
    ],
)
def test_damaged_cache_is_made_again(
    name: str, damage: Callable[[Path], None], dataset: DataSet, tmp_path: Path, made: Mock
) -> None:
    load(dataset, tmp_path)
    (file,) = tmp_path.glob(f"*/{name}")
    damage(file)
    for _ in range(2):
        assert_same(load(dataset, tmp_path), directly(dataset, Windowing(64)))
    assert made.call_count == 2


def test_threads_and_processes_do_the_work_once(dataset: DataSet, tmp_path: Path, made: Mock) -> None:
    """Two threads here and two of another process ask at once."""
    context = multiprocessing.get_context("fork")
    gate, found = context.Barrier(2), context.SimpleQueue()
    tiny_tokenizer("wordpiece")

    def ask() -> None:
        gate.wait(60)
        with ThreadPoolExecutor() as threads:
            sums = list(threads.map(lambda _: int(load(dataset, tmp_path).input_ids_T.sum()), range(2)))
        found.put((made.call_count, *sums))

    other = context.Process(target=ask)
    other.start()
    ask()
    other.join()
    (made_here, *here), (made_there, *there) = found.get(), found.get()
    assert made_here + made_there == 1
    assert len({*here, *there}) == 1
