"""Choices of commands: names of trackers and questions of `hpo compare`, read without pydantic."""

from typing import Literal

TrackerName = Literal["mlflow", "tensorboard", "wandb"]
MOST_SEEDS = 200
"""Largest number of seeds of a compared configuration."""
CONFIGURATIONS: Literal["configurations"] = "configurations"
Question = Literal["precisions", "base_precision", "optimizer_state", "configurations"]
