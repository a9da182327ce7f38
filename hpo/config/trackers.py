"""The trackers that can show a study."""

from __future__ import annotations

from typing import Literal

TrackerName = Literal["mlflow", "tensorboard", "wandb"]
