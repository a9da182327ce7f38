"""Sampling of training windows from several sources.

Training draws from a source of n windows in proportion to `weight * n^(1/temperature)` (arXiv 1907.05019). An
epoch has as many windows as all sources together, and the same number of each source in every epoch. A source
is read in passes: a pass is a permutation of its windows, and an epoch begins at the end of the epoch before.
A source above its size repeats windows within an epoch; a source below it shows another part in each. At a
temperature of 1 with equal weights an epoch holds every window once.

Suffix: S sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpo.errors import InputError
from hpo.tasks.tokenized_split import IntArray, TokenizedSplit, starts


@dataclass(frozen=True)
class SourceSampling:
    """Number of windows of each source in an epoch. Windows have the order of the sources."""

    names: tuple[str, ...]
    sizes_S: tuple[int, ...]
    """Number of all windows of each source."""
    drawn_S: tuple[int, ...]
    """Number of windows of each source in an epoch."""

    def windows(self, seed: int, epoch: int) -> IntArray:
        """Return the windows of an epoch, source by source; they depend on the arguments alone."""
        parts = []
        for number, first in enumerate(starts(np.array(self.sizes_S))[:-1]):
            size, drawn = self.sizes_S[number], self.drawn_S[number]
            if drawn:
                begin, end = epoch * drawn, (epoch + 1) * drawn
                passes = range(begin // size, (end - 1) // size + 1)
                # The number of the source is above 0: NumPy takes [a, b] and [a, b, 0] for the same seed.
                orders = [np.random.default_rng([seed, at, number + 1]).permutation(size) for at in passes]
                begin -= passes[0] * size
                parts.append(first + np.concatenate(orders)[begin : begin + drawn])
        return np.concatenate(parts)

    def facts(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the sources for a trial's record."""
        return {
            name: {"num_windows": size, "windows_per_epoch": drawn}
            for name, size, drawn in zip(self.names, self.sizes_S, self.drawn_S, strict=True)
        }

    def drawn_shares(self, num_epochs: int, windows: IntArray) -> dict[str, float]:
        """Return the share of each source in `num_epochs` whole epochs and `windows` of the next one."""
        source_N = np.searchsorted(np.cumsum(self.sizes_S), windows, side="right")
        drawn_S = num_epochs * np.array(self.drawn_S) + np.bincount(source_N, minlength=len(self.names))
        return dict(zip(self.names, (drawn_S / max(1, drawn_S.sum())).tolist(), strict=True))


def source_sampling(
    split: TokenizedSplit, num_rows: Mapping[str, int], temperature: float, weights: Mapping[str, float]
) -> SourceSampling | None:
    """Return the sampling of a training split, or None for a single source.

    `num_rows` has the number of rows of each source. Raises InputError for the weight of an unknown source,
    and if all weights are 0.
    """
    if unknown := [name for name in weights if name not in num_rows]:
        known = ", ".join(num_rows) or "none"
        raise InputError(f"sampling_weight.{unknown[0]}: there is no such source. Known: {known}.")
    if not num_rows:
        return None
    ends_S = np.cumsum(list(num_rows.values()))
    source_W = np.searchsorted(ends_S, split.window_example_W, side="right")
    sizes_S = np.bincount(source_W, minlength=len(ends_S))
    weight_S = np.array([weights.get(name, 1.0) for name in num_rows])
    if not weight_S.any():
        raise InputError("sampling_weight: one source must have a weight above 0, but all have 0.")
    share_S = weight_S / weight_S.max() * (sizes_S / sizes_S.max()) ** (1 / temperature)
    drawn_S = _rounded(share_S / share_S.sum() * sizes_S.sum())
    return SourceSampling(tuple(num_rows), tuple(map(int, sizes_S)), tuple(map(int, drawn_S)))


def _rounded(exact_S: NDArray[np.float64]) -> IntArray:
    """Round to whole numbers with the same sum: down, then the largest remainders up."""
    whole_S: NDArray[np.int64] = np.floor(exact_S).astype(np.int64)
    missing = round(exact_S.sum()) - whole_S.sum()
    whole_S[np.argsort(whole_S - exact_S, kind="stable")[:missing]] += 1
    return whole_S
