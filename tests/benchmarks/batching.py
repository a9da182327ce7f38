"""How often two texts of a batch meet again in the next epoch, and what share of a batch is padding.

    python tests/benchmarks/batching.py

Batches are `ours` (`hpo.data.batches.training_batches`), `sorted` (chunks of 50 batches, sorted by length),
`trainer` (transformers' LengthGroupedSampler) and `random`. Lengths are those of the sets `sgd` (long) and
`nlupp` (short) in MiniLM's tokens, drawn with replacement where a set is smaller; without the sets, of
generated posts. Nothing is timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice

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


def lengths_of(workload: Workload) -> Lengths:
    """Lengths in tokens of the workload's training texts."""
    path = REAL_SETS / workload.real_set / "train.jsonl"
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in islice(lines, 5000)]
    else:
        low, high = workload.synthetic_sentences
        texts = [row.text for row in SyntheticRows("train", 2000, min_sentences=low, max_sentences=high)]
    tokenizer = load_tokenizer("minilm", revision=None, trust_remote_code=False)
    ids = tokenizer(texts, truncation=True, max_length=workload.max_length)["input_ids"]
    return np.array([len(row) for row in ids])


def random_order(lengths: Lengths, batch_size: int, epoch: int) -> list[Lengths]:
    return cut(np.random.default_rng([0, epoch]).permutation(len(lengths)), batch_size)


def trainer(lengths: Lengths, batch_size: int, epoch: int) -> list[Lengths]:
    """As `transformers.trainer_pt_utils.get_length_grouped_indices`."""
    chunk_batches = max(1, min(len(lengths) // (batch_size * 4), 50))
    return sorted_chunks(-lengths, batch_size, epoch, chunk_batches)


def sorted_chunks(keys: Lengths, batch_size: int, epoch: int, chunk_batches: int = 50) -> list[Lengths]:
    """Chunks of so many batches in random order, each sorted by a key."""
    chunks = random_order(keys, chunk_batches * batch_size, epoch)
    order = np.concatenate([chunk[np.argsort(keys[chunk], kind="stable")] for chunk in chunks])
    return cut(order, batch_size)


def cut(order: Lengths, batch_size: int) -> list[Lengths]:
    """Successive batches of an order."""
    return np.split(order, range(batch_size, len(order), batch_size))


RULES: dict[str, Rule] = {
    "ours": lambda lengths, batch_size, epoch: training_batches(lengths, batch_size, 0, epoch),
    "sorted": sorted_chunks,
    "trainer": trainer,
    "random": random_order,
}


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
    for workload in WORKLOADS.values():
        known = lengths_of(workload)
        print(f"\n{workload.name} texts: {known.mean():.0f} tokens, {known.min()} to {known.max()}")
        print(f"{'texts/batch':14}" + "".join(f"{name:>16}" for name in RULES))
        for num_texts, batch_size in CASES:
            lengths = np.random.default_rng(1).choice(known, num_texts, replace=num_texts > len(known))
            cells = [
                f"{meeting_again(rule, lengths, batch_size):.2f}, "
                f"{padding_share(rule, lengths, batch_size):.1%}"
                for rule in RULES.values()
            ]
            print(f"{num_texts:>8}/{batch_size:<5}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
