"""Analysis of a model's predictions on a split: intervals, classes, errors, verdicts."""
