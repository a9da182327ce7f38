"""A kind of task of your own, which a study file gets by `code: own_kind.py`: how often something occurs."""

import numpy as np
import torch
from torch.nn.functional import poisson_nll_loss

import hpo
from hpo.tasks.regression import Regression
from hpo.tasks.sums import mean_of_windows


@hpo.kind
class Count(Regression):
    """The head gives the logarithm of a rate; the metrics are those of `regression`."""

    name = "count"
    losses = ("poisson",)

    def label(self, value):
        if type(value) not in (int, float) or value < 0 or value % 1:
            raise ValueError(f" must be a whole number of at least 0, but got {value!r}")
        return float(value)

    def loss_sum(self, logits, target, *_):
        known = self.labelled(target)
        loss = poisson_nll_loss(logits.squeeze(-1), torch.where(known, target, 0.0), reduction="none")
        return torch.where(known, loss, 0.0).sum()

    def decode(self, logits, split, *_):
        return np.exp(mean_of_windows(logits, split)[:, 0]).tolist()
