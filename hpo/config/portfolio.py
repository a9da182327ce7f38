"""Published configurations for fine-tuning encoders, tried before a learning sampler draws any.

A few ranked configurations suffice: arXiv 2407.18990. They lie far apart, so that one of them is near the
optimum for the encoder's size and the data. The claim of a new trial chooses the next one, because it knows
the planned number of trials.
"""

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
"""Sources and settings, by rank; `COMMON` has the settings that they share."""
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
"""Largest share of a study's planned trials, rounded up."""


def portfolio(config: StudyConfig) -> list[tuple[dict[str, Any], str]]:
    """Return the configurations for a study, as Optuna stores them, by rank, with their sources.

    There are none for a fresh encoder, an encoder with an adapter, another optimiser than AdamW, or a sampler
    that does not learn.
    """
    space, training = config.search_space, config.training
    if not config.portfolio or config.comparison is not None or config.has_own_loop:
        return []
    if config.sampler.name not in ("tpe", "gp", "nsga2") or training.adapter != "none" or "adapter" in space:
        return []
    encoders = (*getattr(space.get("encoder"), "choices", ()), training.encoder or config.model.encoder)
    if not all(isinstance(one, str) and one not in ENCODERS for one in encoders):
        return []
    found: list[tuple[dict[str, Any], str]] = []
    for source, settings in PORTFOLIO:
        fits = fitting(space, {**COMMON, **settings})
        optimizer = fits.get("optimizer") if "optimizer" in space else training.optimizer
        is_new = fits not in [params for params, _ in found]
        if "learning_rate" in fits and optimizer == COMMON["optimizer"] and is_new:
            found.append((fits, source))
    return found
