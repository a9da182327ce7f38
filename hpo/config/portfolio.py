"""Configurations with which encoders were fine-tuned well, tried before a sampler that learns draws any.

A few ranked ones suffice: arXiv 2407.18990. They lie far apart, so that one is near to what the encoder's
size and the data ask for. The claim of a new trial chooses the next one. It knows how many trials are
planned: with a budget this depends on what the first trials took.
"""

from __future__ import annotations

from typing import Any

from hpo.config.first import fitting
from hpo.config.study_config import StudyConfig
from hpo.extensions import ENCODERS

PORTFOLIO: tuple[tuple[str, dict[str, Any]], ...] = (
    ("BERT, Devlin et al. 2019, arXiv 1810.04805, A.3", {"learning_rate": 5e-5, "batch_size": 32}),
    (
        "ELECTRA, Clark et al. 2020, arXiv 2003.10555, table 7",
        {"learning_rate": 1e-4, "batch_size": 32, "layerwise_lr_decay": 0.8, "weight_decay": 0.0},
    ),
    (
        "RoBERTa, Liu et al. 2019, arXiv 1907.11692, table 10",
        {"learning_rate": 2e-5, "batch_size": 16, "epochs": 10, "warmup_ratio": 0.06, "weight_decay": 0.1},
    ),
    (
        "small BERTs, Turc et al. 2019, arXiv 1908.08962",
        {"learning_rate": 3e-4, "batch_size": 64, "epochs": 4},
    ),
)
"""By rank, each with its source and what is its own."""
COMMON = {
    "optimizer": "adamw",
    "schedule": "linear",
    "epochs": 3,
    "warmup_ratio": 0.1,
    "weight_decay": 0.01,
    "layerwise_lr_decay": 1.0,
    "dropout": 0.1,
}
SHARE = 0.1
"""Share of a study's planned trials, rounded up: what is lost if all of the portfolio are bad."""


def portfolio(config: StudyConfig) -> list[tuple[dict[str, Any], str]]:
    """Return the configurations for a study as Optuna holds them, by rank, with their sources.

    They have settings that the study searches, with values in their ranges. There are none for a fresh
    encoder, one that is frozen under an adapter, another optimiser than AdamW, or a sampler that does not
    learn.
    """
    if config.comparison is not None or config.has_own_loop:
        return []
    if config.training.adapter != "none" or "adapter" in config.search_space:
        return []
    if not config.portfolio or config.sampler.name not in ("tpe", "gp", "nsga2"):
        return []
    choices = getattr(config.search_space.get("encoder"), "choices", ())
    named = (*choices, config.training.encoder or config.model.encoder)
    if not all(isinstance(one, str) and one not in ENCODERS for one in named):
        return []
    found: list[tuple[dict[str, Any], str]] = []
    for source, settings in PORTFOLIO:
        fits = fitting(config.search_space, {**COMMON, **settings})
        optimizer = fits.get("optimizer") if "optimizer" in config.search_space else config.training.optimizer
        if (
            "learning_rate" in fits
            and optimizer == COMMON["optimizer"]
            and fits not in [params for params, _ in found]
        ):
            found.append((fits, source))
    return found
