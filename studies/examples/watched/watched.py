"""A callback and a sampler of your own, for study.yaml."""

import logging

import optuna
import torch

import hpo

logger = logging.getLogger("hpo.watched")  # shown as the messages of hpo


class Limit(hpo.Section):
    ratio: float = 1.5  # end a trial whose loss is so many times its lowest


@hpo.callback("divergence", Limit)
class Divergence:
    """Ends a trial whose loss has risen, and logs the norm of the weights at each evaluation."""

    def __init__(self, options):
        self.ratio = options.ratio
        self.lowest = float("inf")  # a trial that resumes begins here again

    def on_evaluation(self, state):
        norm = torch.stack([weight.norm() for weight in state.model.parameters()]).norm()
        logger.info("step %d: loss %.3f, weights %.1f", state.step, state.train_loss, norm)
        self.lowest = min(self.lowest, state.train_loss)
        if state.train_loss > self.ratio * self.lowest:
            return f"the loss rose from {self.lowest:.3f} to {state.train_loss:.3f}"
        return None

    def on_end(self, state):
        logger.info("%s at step %d", state.outcome, state.step)


class Candidates(hpo.Section):
    number: int = 24


@hpo.sampler("careful", Candidates)
def careful(options, seed):
    """TPE that compares more candidates."""
    return optuna.samplers.TPESampler(n_startup_trials=4, n_ei_candidates=options.number, seed=seed)
