"""Does a cheaper run tell which configurations are best? Rank correlations over a table.

Spearman's correlation of a cheap score with that of the whole trial, over all configurations and over the
better half alone: telling the good from the bad is easier than telling the best from the good.
"""

from __future__ import annotations

import pandas as pd
from search_table import Table


def rank_correlation(pairs: pd.DataFrame) -> float:
    """Spearman's, of the columns `cheap` and `whole`."""
    return float(pairs["cheap"].corr(pairs["whole"], method="spearman"))


def better_half(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs whose whole trial is among the better half."""
    return pairs.sort_values("whole", kind="stable").iloc[len(pairs) // 2 :]


def after_evaluation(table: Table, index: int) -> pd.DataFrame:
    """The best score up to evaluation `index`, and the trial's."""
    pairs = [
        (max(one.score for one in row.evaluations if one.index <= index), row.score)
        for row in table.rows.values()
        if row.score is not None
    ]
    return pd.DataFrame(pairs, columns=["cheap", "whole"])


def between_precisions(table: Table, cheap: str, whole: str) -> pd.DataFrame:
    """The scores of the same configuration in two precisions."""
    scores = pd.DataFrame([{**row.params, "score": row.score} for row in table.rows.values()])
    others = [name for name in table.study.search_space if name != "fp_precision"]
    by_precision = scores.pivot(index=others, columns="fp_precision", values="score")
    return by_precision[[cheap, whole]].dropna().set_axis(["cheap", "whole"], axis="columns")


def print_fidelity(table: Table) -> None:
    """Print the rank correlations of every cheap fidelity that the table holds."""
    num_evaluations = max(len(row.evaluations) for row in table.rows.values())
    cheap = {
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
