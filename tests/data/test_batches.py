"""Batches: tensors, targets and the choice of windows."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from support.tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.data.batches import collate, evaluation_batches, num_batches, padded_length, training_batches
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.tasks.tokenized_split import TokenizedSplit, Windowing

JOINT = Task("joint", "token_classification", ("x", "y"))
OVERLAP = Task("overlap", "token_classification", ("x", "y"), spans_may_overlap=True)
ANSWER = Task("answer", "span_extraction", ("x",))
TOPICS = Task("topics", "multi_label", ("x", "y", "z"))
PROOF = Task("proof", "span_per_label", ("y", "x"), evidence_for="topics")
TONE = Task("tone", "single_label", ("calm", "angry"))
GRADE = Task("grade", "regression")
TASKS = (JOINT, OVERLAP, ANSWER, TOPICS, PROOF, TONE, GRADE)

ALL_LABELS = {"tone": "angry", "topics": ["x", "z"], "grade": 1.5}
SPANS = {"x": [(0, 1), (2, 3)], "y": [(4, 5)]}
SOME = ("joint", "overlap", "topics", "proof")
ROWS = [
    Example("a", "a b c d e", ALL_LABELS, {"x": [(2, 7)]}, annotated=frozenset(task.name for task in TASKS)),
    Example("b", "a b c", {"topics": ["x", "y"]}, SPANS, annotated=frozenset(SOME)),
    Example("c", "a", {}, {}),
]


def tokenized() -> TokenizedSplit:
    return tokenize_split(ROWS, TASKS, tiny_tokenizer("wordpiece"), Windowing(64))


def test_layout_of_targets() -> None:
    targets = collate(tokenized(), [0, 1, 2], TASKS, pad_id=0).targets
    i = -100
    # [CLS] a b c d e [SEP], [CLS] a b c [SEP], [CLS] a [SEP]
    assert targets["joint"].tolist() == [[i, 0, 1, 2, 2, 0, i, i], [i, 1, 1, 3, i, i, i, i], [i] * 8]
    x, y = targets["overlap"].unbind(dim=2)
    assert x.tolist() == [[i, 0, 1, 2, 2, 0, i, i], [i, 1, 1, 0, i, i, i, i], [i] * 8]
    assert y.tolist() == [[i, 0, 0, 0, 0, 0, i, i], [i, 0, 0, 1, i, i, i, i], [i] * 8]
    assert targets["answer"].tolist() == [[2, 4], [i, i], [i, i]]
    assert targets["topics"].tolist() == [[1, 0, 1], [1, 1, 0], [-1, -1, -1]]
    # Evidence of y is asked for only where y holds, and nowhere in a row without annotation.
    y, x = targets["proof"].unbind(dim=2)
    assert y.tolist() == [[-1] * 8, [-1, 0, 0, 1, -1, -1, -1, -1], [-1] * 8]
    assert x.tolist() == [[-1, 0, 1, 1, 1, 0, -1, -1], [-1, 1, 1, 0, -1, -1, -1, -1], [-1] * 8]
    assert targets["tone"].tolist() == [1, i, i]
    grade = torch.tensor([1.5, np.nan, np.nan], dtype=torch.float64)
    torch.testing.assert_close(targets["grade"], grade, equal_nan=True)
    types = {"topics": torch.float32, "proof": torch.float32, "grade": torch.float64}
    for name, target in targets.items():
        assert target.dtype == types.get(name, torch.int64), name


@pytest.mark.parametrize(
    ("longest", "max_length", "padded"),
    [
        *[(1, 64, 8), (8, 64, 8), (9, 64, 16), (50, 50, 50), (49, 50, 50), (64, 512, 64)],
        *[(65, 512, 80), (128, 512, 128), (129, 512, 160), (300, 512, 320), (300, 310, 310)],
    ],
)
def test_lengths_are_padded_to_few_values(longest: int, max_length: int, padded: int) -> None:
    assert padded_length(longest, max_length) == padded


def test_a_batch_is_padded_to_its_longest_window() -> None:
    tokenizer, split = tiny_tokenizer("wordpiece"), tokenized()
    batch = collate(split, [2, 0], (), pad_id=9)
    ids = [tokenizer(ROWS[row].text)["input_ids"] for row in (2, 0)]
    assert batch.input_ids_BL.tolist() == [ids[0] + [9] * 5, ids[1] + [9]]
    assert batch.attention_mask_BL.tolist() == [[1] * 3 + [0] * 5, [1] * 7 + [0]]
    assert (batch.targets, batch.type_ids_BL, batch.num_tokens) == ({}, None, 10)
    assert batch.windows_B.tolist() == [2, 0]
    assert batch.input_ids_BL.dtype == batch.attention_mask_BL.dtype == torch.int64
    exact = collate(replace(split, has_few_lengths=False), [2, 0], (), pad_id=9)
    assert exact.input_ids_BL.shape == (2, 7)


LENGTHS = np.random.default_rng(0).integers(5, 300, size=5003)


@pytest.mark.parametrize(("num_windows", "batch_size"), [(5003, 16), (160, 16), (5, 16), (16, 16), (7, 1)])
def test_training_batches_hold_every_window_once(num_windows: int, batch_size: int) -> None:
    batches = training_batches(LENGTHS[:num_windows], batch_size, seed=1, epoch=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_windows))
    assert len(batches) == num_batches(num_windows, batch_size)
    sizes = sorted(map(len, batches), reverse=True)
    assert set(sizes[:-1]) <= {batch_size}
    assert sizes[-1] == (num_windows % batch_size or batch_size)


def padding_share(batches: list[np.ndarray]) -> float:
    padded = sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)
    return 1 - LENGTHS.sum() / padded


def test_training_batches_are_of_similar_length_yet_random() -> None:
    batches = training_batches(LENGTHS, 16, seed=1, epoch=0)
    again, other = (training_batches(LENGTHS, 16, seed=1, epoch=epoch) for epoch in (0, 1))
    assert np.array_equal(np.concatenate(batches), np.concatenate(again))
    assert not np.array_equal(np.concatenate(batches), np.concatenate(other))
    shuffled = np.random.default_rng(0).permutation(len(LENGTHS))
    assert padding_share(batches) < 0.06
    assert padding_share([shuffled[i : i + 16] for i in range(0, len(shuffled), 16)]) > 0.4
    means = np.array([LENGTHS[batch].mean() for batch in batches])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2


@pytest.mark.parametrize(("num_windows", "batch_size"), [(160, 16), (1000, 32), (1600, 16)])
def test_the_texts_of_a_batch_seldom_meet_again(num_windows: int, batch_size: int) -> None:
    """Sorted by length alone, three in four pairs of few texts would be in the next epoch's batches."""
    pairs: list[set[tuple[int, int]]] = []
    for epoch in range(6):
        batches = training_batches(LENGTHS[:num_windows], batch_size, 1, epoch)
        pairs.append({pair for batch in batches for pair in combinations(sorted(batch.tolist()), 2)})
    again = [len(one & other) / len(one) for one, other in pairwise(pairs)]
    assert np.mean(again) < 0.27


def test_evaluation_batches_keep_to_the_budget() -> None:
    batches = evaluation_batches(LENGTHS, max_tokens=2048)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(LENGTHS)))
    sizes = [len(batch) * padded_length(int(LENGTHS[batch].max()), 512) for batch in batches]
    assert max(sizes) <= 2048
    assert np.mean(sizes) > 0.8 * 2048
    assert LENGTHS[batches[0][0]] == LENGTHS.max()
    over = evaluation_batches(np.array([100, 5, 100]), max_tokens=64)
    assert [batch.tolist() for batch in over] == [[0], [2], [1]]
    assert padding_share(batches) < 0.05
