import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with one entry for each tokenised split."""
    times: list[int] = []

    def counted(*args: object) -> Iterator[TokenizedSplit]:
        times.append(1)
        return tokenize_chunks(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(hpo.data.token_cache, "tokenize_chunks", counted)
    return times


def load(
    dataset: DataSet,
    cache: Path,
    split: str = "train",
    family: str = "wordpiece",
    data: dict[str, Any] | None = None,
    **windowing: Any,
) -> TokenizedSplit:
    dataset, how = replace(dataset, **data or {}), replace(Windowing(64), **windowing)
    return load_tokenized(dataset, split, tiny_tokenizer(family), how, cache)


def directly(dataset: DataSet, windowing: Windowing) -> TokenizedSplit:
    return tokenize_split(dataset.splits["train"], dataset.tasks, tiny_tokenizer("wordpiece"), windowing)


def assert_same(one: TokenizedSplit, other: TokenizedSplit) -> None:
    np.testing.assert_equal(asdict(one), asdict(other))


def test_a_split_is_tokenised_once_and_then_mapped(dataset: DataSet, tmp_path: Path, made: list[int]) -> None:
    direct = directly(dataset, Windowing(64))
    for _ in range(2):
        cached = load(dataset, tmp_path)
        assert_same(cached, direct)
        assert isinstance(cached.input_ids_T.base, np.memmap)
        assert cached.examples is dataset.splits["train"]
    assert len(made) == 1
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("long_text", ["truncate", "window"])
def test_a_split_written_in_chunks_is_the_whole(
    long_text: str, dataset: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windowing = Windowing(32, long_text, 8)
    whole = directly(dataset, windowing)
    monkeypatch.setattr("hpo.data.tokenization._CHUNK", 7)
    cached = load(dataset, tmp_path, max_length=32, long_text=long_text, stride=8)
    assert_same(cached, whole)
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
    first: dict[str, Any],
    second: dict[str, Any],
    times: int,
    dataset: DataSet,
    tmp_path: Path,
    made: list[int],
) -> None:
    load(dataset, tmp_path, **first)
    load(dataset, tmp_path, **second)
    assert len(made) == times


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("owned_T.npy", lambda path: path.write_bytes(b"")),
        ("target.severity.npy", Path.unlink),
        ("char_end_T.npy", lambda path: path.write_bytes(b"more" + path.read_bytes())),
        ("contents.json", lambda path: path.write_bytes(path.read_bytes()[:-9])),
    ],
)
def test_a_damaged_cache_is_made_again(
    name: str, damage: Callable[[Path], None], dataset: DataSet, tmp_path: Path, made: list[int]
) -> None:
    direct = directly(dataset, Windowing(64))
    load(dataset, tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    damage(folder / name)
    assert_same(load(dataset, tmp_path), direct)
    assert_same(load(dataset, tmp_path), direct)
    assert len(made) == 2


def test_concurrent_threads_and_processes_do_the_work_once(
    dataset: DataSet, tmp_path: Path, made: list[int]
) -> None:
    """Two threads here and two of another process ask at once."""
    context = multiprocessing.get_context("fork")
    gate, found = context.Barrier(2), context.SimpleQueue()
    tiny_tokenizer("wordpiece")

    def ask() -> None:
        gate.wait(60)
        with ThreadPoolExecutor() as threads:
            sums = list(threads.map(lambda _: int(load(dataset, tmp_path).input_ids_T.sum()), range(2)))
        found.put((len(made), *sums))

    other = context.Process(target=ask)
    other.start()
    ask()
    other.join()
    (made_here, *here), (made_there, *there) = found.get(), found.get()
    assert made_here + made_there == 1
    assert len({*here, *there}) == 1
