"""How often two texts of a batch meet again in the next epoch, and what share of a batch is padding.

    python tests/benchmarks/batching.py [rule ...]

Rules are `ours` (`hpo.data.batches.training_batches`), `random`, `sorted` (chunks of 50 batches, sorted by
length), `trainer` (transformers' LengthGroupedSampler) and `jitter:20` or `jitter:20:50` (sorted by the
length times a random factor of up to 20 % more or less, all texts together or in chunks of 50 batches).
Lengths are those of the sets `sgd` (long) and `nlupp` (short) in MiniLM's tokens, drawn with replacement
where a set is smaller; without the sets, of generated posts. Nothing is timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from real_sets import REAL_SETS
from workload import WORKLOADS, Workload

from hpo.data.batches import training_batches
from hpo.data.synthetic import SyntheticRows
from hpo.models.encoder import load_tokenizer

Lengths = NDArray[np.int64]
Rule = Callable[[Lengths, int, int], list[NDArray[np.int64]]]

CASES = ((160, 16), (320, 16), (1000, 32), (1600, 16), (20000, 32))
"""Number of texts and batch size."""
EPOCHS = 8
RULES = ("ours", "random", "sorted", "trainer", "jitter:10", "jitter:20", "jitter:30", "jitter:20:50")


def lengths_of(workload: Workload) -> Lengths:
    """Lengths in tokens of the workload's training texts."""
    path = REAL_SETS / workload.real_set / "train.jsonl"
    if path.exists():
        texts = [json.loads(line)["text"] for line in path.open(encoding="utf-8")][:5000]
    else:
        low, high = workload.synthetic_sentences
        texts = [row.text for row in SyntheticRows("train", 2000, min_sentences=low, max_sentences=high)]
    tokenizer = load_tokenizer("minilm", revision=None, trust_remote_code=False)
    ids = tokenizer(texts, truncation=True, max_length=workload.max_length)["input_ids"]
    return np.array([len(row) for row in ids])


def cut(order: Lengths, batch_size: int) -> list[Lengths]:
    """Successive batches of an order."""
    return np.split(order, range(batch_size, len(order), batch_size))


def sorted_chunks(keys: Lengths, order: Lengths, chunk_size: int) -> Lengths:
    """The order, sorted by a key in each chunk."""
    chunks = cut(order, chunk_size)
    return np.concatenate([chunk[np.argsort(keys[chunk], kind="stable")] for chunk in chunks])


def jittered(percent: float, chunk_batches: int | None) -> Rule:
    """Sort by the length times a random factor; what does not fill a batch is drawn before."""

    def rule(lengths: Lengths, batch_size: int, epoch: int) -> list[Lengths]:
        generator = np.random.default_rng([0, epoch])
        order = generator.permutation(len(lengths))
        keys = lengths * generator.uniform(1 - percent / 100, 1 + percent / 100, len(lengths))
        full = len(order) - len(order) % batch_size
        chunk_size = (chunk_batches or len(order)) * batch_size
        batches = cut(sorted_chunks(keys, order[:full], chunk_size), batch_size)
        return [*batches, order[full:]] if full < len(order) else batches

    return rule


def trainer(lengths: Lengths, batch_size: int, epoch: int) -> list[Lengths]:
    """As `transformers.trainer_pt_utils.get_length_grouped_indices`."""
    order = np.random.default_rng([0, epoch]).permutation(len(lengths))
    chunk_size = max(1, min(len(lengths) // (batch_size * 4), 50)) * batch_size
    return cut(sorted_chunks(-lengths, order, chunk_size), batch_size)


def sorted_by_length(lengths: Lengths, batch_size: int, epoch: int) -> list[Lengths]:
    """Chunks of 50 batches, sorted by length, and equal lengths in random order."""
    order = np.random.default_rng([0, epoch]).permutation(len(lengths))
    return cut(sorted_chunks(lengths, order, 50 * batch_size), batch_size)


def rule_of(name: str) -> Rule:
    kind, *numbers = name.split(":")
    if kind == "jitter":
        return jittered(float(numbers[0]), int(numbers[1]) if len(numbers) > 1 else None)
    return {
        "ours": lambda lengths, size, epoch: training_batches(lengths, size, 0, epoch),
        "random": lambda lengths, size, epoch: cut(
            np.random.default_rng([0, epoch]).permutation(len(lengths)), size
        ),
        "sorted": sorted_by_length,
        "trainer": trainer,
    }[kind]


def meeting_again(rule: Rule, lengths: Lengths, batch_size: int) -> float:
    """The share of the pairs of a batch that are a pair in the next epoch too."""
    again = pairs = 0
    before = np.zeros(0, np.int64)
    for epoch in range(EPOCHS):
        batch_of = np.empty(len(lengths), np.int64)
        for number, batch in enumerate(rule(lengths, batch_size, epoch)):
            batch_of[batch] = number
        if epoch:
            sizes = np.bincount(before), np.unique([before, batch_of], axis=1, return_counts=True)[1]
            pairs += int((sizes[0] * (sizes[0] - 1)).sum())
            again += int((sizes[1] * (sizes[1] - 1)).sum())
        before = batch_of
    return again / pairs


def padding_share(rule: Rule, lengths: Lengths, batch_size: int) -> float:
    """The share of the places in batches, padded to their longest text, that hold padding."""
    batches = [batch for epoch in range(EPOCHS) for batch in rule(lengths, batch_size, epoch)]
    return 1 - EPOCHS * lengths.sum() / sum(len(batch) * lengths[batch].max() for batch in batches)


def main() -> None:
    names = sys.argv[1:] or RULES
    for workload in WORKLOADS.values():
        known = lengths_of(workload)
        print(f"\n{workload.name} texts: {known.mean():.0f} tokens, {known.min()} to {known.max()}")
        print(f"{'texts/batch':14}" + "".join(f"{name:>16}" for name in names))
        for num_texts, batch_size in CASES:
            lengths = np.random.default_rng(1).choice(known, num_texts, replace=num_texts > len(known))
            cells = [
                f"{meeting_again(rule_of(name), lengths, batch_size):.2f}, "
                f"{padding_share(rule_of(name), lengths, batch_size):.1%}"
                for name in names
            ]
            print(f"{num_texts:>8}/{batch_size:<5}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
