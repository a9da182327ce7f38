"""Batches of windows and their tensors.

Suffixes: B windows of a batch; L padded length; T their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpo.data.source_sampling import SourceSampling
from hpo.tasks.kind import Task, kind_of
from hpo.tasks.tokenized_split import AnyArray, IntArray, TokenizedSplit, ragged_arange

CHUNK_BATCHES = 50
"""Number of batches in a chunk; training sorts each chunk by length."""
JITTER_BATCHES = 1.5
"""Largest random move of a window in that order, in batches."""


@dataclass
class Batch:
    """Windows padded to one length, with targets in the layout of `hpo.tasks.kind`."""

    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    type_ids_BL: Tensor | None
    targets: dict[str, Tensor]
    windows_B: IntArray
    lengths_B: IntArray

    @property
    def inputs(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The arguments of a model: no mask without padding, since a GPU's flash kernel takes none.

        The lengths are on the host, so nothing waits for the device.
        """
        is_padded = self.lengths_B.size and self.lengths_B.min() < self.input_ids_BL.shape[1]
        return self.input_ids_BL, self.attention_mask_BL if is_padded else None, self.type_ids_BL

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_B.sum())

    def to(self, device: str | torch.device) -> Batch:
        """Move the tensors to a device; a GPU copies from pinned memory, without a wait."""
        pinned = torch.device(device).type == "cuda"
        return self.map(
            lambda values: (values.pin_memory() if pinned else values).to(device, non_blocking=True)
        )

    def split(self, micro_batch_size: int) -> list[Batch]:
        """Cut into batches of at most `micro_batch_size` windows with the same padded length."""
        starts = range(0, len(self.windows_B), micro_batch_size)
        return [self.rows(slice(start, start + micro_batch_size)) for start in starts]

    def rows(self, part: slice) -> Batch:
        """Return some of the windows, perhaps none, with the same padded length."""
        return self.map(itemgetter(part), part)

    def map(self, change: Callable[[Tensor], Tensor], windows: slice = slice(None)) -> Batch:
        """Change each tensor, and select some of the windows."""
        return Batch(
            change(self.input_ids_BL),
            change(self.attention_mask_BL),
            None if self.type_ids_BL is None else change(self.type_ids_BL),
            {name: change(target) for name, target in self.targets.items()},
            self.windows_B[windows],
            self.lengths_B[windows],
        )


def padded_length(longest: int, max_length: int) -> int:
    """Round up to a multiple of 8, 16 or 32, but never over `max_length`, an encoder's number of positions.

    Each shape has a cost at its first batch: attention takes 0.1 s to plan on an H200, and the compiler may
    compile. There, texts of about 240 tokens train as fast with multiples of 32 as with multiples of 8.
    """
    multiple = 8 if longest <= 64 else 16 if longest <= 128 else 32
    return max(longest, min(-(-longest // multiple) * multiple, max_length))


def collate(
    split: TokenizedSplit, windows: IntArray | Sequence[int], tasks: Iterable[Task], pad_id: int
) -> Batch:
    """Pad these windows to the longest and build the targets of `tasks` (empty for prediction)."""
    windows_B = np.asarray(windows, dtype=np.int64)
    starts_B = split.window_start_W1[windows_B]
    lengths_B = split.window_start_W1[windows_B + 1] - starts_B
    length = int(lengths_B.max())
    if split.has_few_lengths:
        length = padded_length(length, split.max_length)
    token_T = ragged_arange(starts_B, lengths_B)
    is_token_BL = np.arange(length) < lengths_B[:, None]

    def padded(values_T: AnyArray, padding: int) -> NDArray[np.int64]:
        values_BL = np.full(is_token_BL.shape, padding, dtype=np.int64)
        values_BL[is_token_BL] = values_T[token_T]
        return values_BL

    is_text_BL = padded(split.char_start_T, -1) >= 0
    targets = {
        task.name: torch.from_numpy(kind_of(task).batch_target(split, windows_B, is_text_BL))
        for task in tasks
    }
    return Batch(
        input_ids_BL=torch.from_numpy(padded(split.input_ids_T, pad_id)),
        attention_mask_BL=torch.from_numpy(is_token_BL.astype(np.int64)),
        type_ids_BL=None if split.type_ids_T is None else torch.from_numpy(padded(split.type_ids_T, 0)),
        targets=targets,
        windows_B=windows_B,
        lengths_B=lengths_B,
    )


def num_batches(num_windows: int, batch_size: int) -> int:
    """Return the number of batches in an epoch; one may be smaller."""
    return -(-num_windows // batch_size)


def training_batches(
    lengths_W: IntArray, batch_size: int, seed: int, epoch: int, sampling: SourceSampling | None = None
) -> list[IntArray]:
    """Return one epoch's windows, or the windows of `sampling`, in random batches of similar length.

    The windows of a last smaller batch are drawn at random. The others are shuffled into chunks and sorted by
    length in each. Few chunks would give nearly the same batches in each epoch, so ranks move at random
    before the cut. The list is the same for a (seed, epoch), so training can resume in it.
    """
    generator = np.random.default_rng([seed, epoch])
    order_W = generator.permutation(len(lengths_W) if sampling is None else sampling.windows(seed, epoch))
    num_full = len(order_W) // batch_size
    full, rest = np.split(order_W, [num_full * batch_size])
    num_chunks = max(1, -(-num_full // CHUNK_BATCHES))
    jitter = JITTER_BATCHES * batch_size / num_chunks
    batches: list[IntArray] = []
    for chunk in np.array_split(full.reshape(num_full, batch_size), num_chunks):
        windows = chunk.ravel()
        windows = windows[np.argsort(lengths_W[windows], kind="stable")]
        rank = np.arange(len(windows)) + generator.uniform(-jitter, jitter, len(windows))
        batches.extend(windows[np.argsort(rank)].reshape(-1, batch_size))
    if len(rest):
        batches.append(rest)
    return [batches[i] for i in generator.permutation(len(batches))]


def evaluation_batches(lengths_W: IntArray, max_tokens: int) -> list[IntArray]:
    """Return batches of at most `max_tokens` padded tokens (at least one window), long windows first."""
    order_W = np.argsort(-lengths_W, kind="stable")
    batches: list[IntArray] = []
    start = 0
    while start < len(order_W):
        longest = int(lengths_W[order_W[start]])
        size = max(1, max_tokens // padded_length(longest, max_tokens))
        batches.append(order_W[start : start + size])
        start += size
    return batches
