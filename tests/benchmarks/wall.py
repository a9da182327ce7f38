"""What the searches of `search_wall.py` search, and the score that is their target.

Most learning rates of the space are too low or too high, as where nothing is known.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workload import Workload, study_content, write_workload

if TYPE_CHECKING:
    import optuna

SPACE: dict[str, dict[str, Any]] = {
    "learning_rate": {"type": "float", "low": 1e-6, "high": 3e-3, "log": True},
    "batch_size": {"type": "categorical", "choices": [8, 16, 32]},
    "warmup_ratio": {"type": "float", "low": 0.0, "high": 0.3},
    "weight_decay": {"type": "float", "low": 0.0, "high": 0.3},
}
MARGIN = 0.005
WIDER = 0.02
"""The margin of a second target, since few rows decide on the first one."""


@dataclass(frozen=True)
class Wall:
    """One task of a set, which is searched. Its rows are in a folder."""

    workload: Workload
    epochs: int
    best: float
    """The best validation score of 40 random configurations of the space, each trained to its end."""

    def target(self, margin: float = MARGIN) -> float:
        return self.best - margin

    @classmethod
    def read(cls, path: Path) -> Wall:
        """Read what `write` wrote."""
        content = json.loads(path.read_text())
        return cls(Workload(**content.pop("workload")), **content)

    def write(self, rows: Path) -> None:
        """The rows, and this as `wall.json`."""
        write_workload(self.workload, rows)
        (rows / "wall.json").write_text(json.dumps(asdict(self)))

    def study(self, rows: Path, seed: int, **more: Any) -> dict[str, Any]:
        """The study file that searches it, with the defaults in all that peers have in their way."""
        content = study_content(self.workload, rows, "fp32")
        for name in ("compat", "pruner", "n_trials"):
            del content[name]
        training = content["training"] | {"epochs": self.epochs, "seed": seed}
        content["training"] = {name: value for name, value in training.items() if name not in SPACE}
        return content | {"sampler": {"seed": seed}, "search_space": SPACE, **more}


WALLS = {
    "nlupp": Wall(Workload("nlupp", "nlupp", ("domain",), 64, (1, 2), 256, 200), 2, best=0.923689),
    "snips": Wall(Workload("snips", "snips", ("intent",), 64, (1, 2), 256, 200), 2, best=0.988947),
}


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    return {
        name: trial.suggest_categorical(name, one["choices"])
        if one["type"] == "categorical"
        else trial.suggest_float(name, one["low"], one["high"], log=one.get("log", False))
        for name, one in SPACE.items()
    }
