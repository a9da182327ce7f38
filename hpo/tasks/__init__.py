"""The kinds of task: what the truth, the loss, the predictions and the scores of each are."""
