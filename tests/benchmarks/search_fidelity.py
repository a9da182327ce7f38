"""Does a cheaper run tell which configurations are best? Rank correlations over a table.

Spearman's correlation of a cheap score with that of the whole trial, over all configurations and over the
better half alone: telling the good from the bad is easier than telling the best from the good.
"""

from __future__ import annotations

from collections.abc import Sequence

from scipy.stats import spearmanr
from search_table import Row, Table

Pairs = Sequence[tuple[float, float]]
"""(cheap score, score of the whole trial) of each configuration."""


def rank_correlation(pairs: Pairs) -> float:
    """Spearman's; raises ValueError for fewer than three pairs, which say nothing."""
    if len(pairs) < 3:
        raise ValueError(f"a rank correlation needs at least 3 pairs, but got {len(pairs)}.")
    cheap, whole = zip(*pairs, strict=True)
    return float(spearmanr(cheap, whole).statistic)


def better_half(pairs: Pairs) -> Pairs:
    """The pairs whose whole trial is among the better half."""
    return sorted(pairs, key=lambda pair: pair[1])[len(pairs) // 2 :]


def after_evaluation(table: Table, index: int) -> Pairs:
    """The best score up to evaluation `index`, and the trial's."""
    return [
        (max(one.score for one in row.evaluations if one.index <= index), row.score)
        for row in table.rows.values()
        if row.score is not None
    ]


def between_precisions(table: Table, cheap: str, whole: str) -> Pairs:
    """The scores of the same configuration in two precisions."""
    position = list(table.study.search_space).index("fp_precision")
    of_precision: dict[str, dict[tuple[object, ...], Row]] = {cheap: {}, whole: {}}
    for key, row in table.rows.items():
        if key[position] in of_precision and row.score is not None:
            of_precision[key[position]][key[:position] + key[position + 1 :]] = row
    return [
        (row.score, of_precision[whole][rest].score)
        for rest, row in of_precision[cheap].items()
        if rest in of_precision[whole]
    ]


def print_fidelity(table: Table) -> None:
    """Print the rank correlations of every cheap fidelity that the table holds."""
    num_evaluations = max(len(row.evaluations) for row in table.rows.values())
    cheap: dict[str, Pairs] = {
        f"after evaluation {index} of {num_evaluations}": after_evaluation(table, index)
        for index in range(1, num_evaluations)
    }
    searched = table.study.search_space.get("fp_precision")
    for precision in searched.grid() if searched else ():
        if precision != "fp32":
            cheap[f"{precision} for fp32"] = between_precisions(table, precision, "fp32")
    print(f"{table.study.name}: Spearman's rank correlation with the score of the whole trial")
    print(f"{'':36} {'all':>6} {'better half':>12} {'pairs':>6}")
    for name, pairs in cheap.items():
        half = rank_correlation(better_half(pairs))
        print(f"{name:36} {rank_correlation(pairs):6.3f} {half:12.3f} {len(pairs):6}")
    print()
