"""What a model's predictions on a split tell: intervals, classes, errors, warnings."""
