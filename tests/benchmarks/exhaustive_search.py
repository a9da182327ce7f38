"""What the searches of `search_wall.py` search, and the score that is their target.

Most learning rates of the space are too low or too high, as where nothing is known. An exhaustive search
trains a random sample of it to the end; its best score on validation minus half a point is the target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from workload import Workload, study_content, write_workload

if TYPE_CHECKING:
    import optuna

SPACE: dict[str, dict[str, Any]] = {
    "learning_rate": {"type": "float", "low": 1e-6, "high": 3e-3, "log": True},
    "batch_size": {"type": "categorical", "choices": [8, 16, 32]},
    "warmup_ratio": {"type": "float", "low": 0.0, "high": 0.3},
    "weight_decay": {"type": "float", "low": 0.0, "high": 0.3},
}
EXHAUSTED = Path(__file__).with_name("exhausted")
TASKS = {"nlupp": "domain", "snips": "intent"}
"""The one task of each set."""
MARGIN = 0.005
WIDER = 0.02
"""A second target, of which is told when the searches passed it: few rows decide on the first one."""


@dataclass(frozen=True)
class Wall:
    """What is searched: one task of a set, whose rows are in a folder."""

    workload: Workload
    epochs: int

    @classmethod
    def read(cls, path: Path) -> Wall:
        """Of a file that has it `asdict`, maybe beside other keys."""
        content = json.loads(path.read_text())
        fields = content["workload"]
        return cls(Workload(**(fields | {"tasks": tuple(fields["tasks"])})), content["epochs"])

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


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    return {
        name: trial.suggest_categorical(name, one["choices"])
        if one["type"] == "categorical"
        else trial.suggest_float(name, one["low"], one["high"], log=one.get("log", False))
        for name, one in SPACE.items()
    }


def exhaust(wall: Wall, num_runs: int, rows: Path) -> list[dict[str, Any]]:
    """Train a random sample of the space with our executor; the score of each is its best evaluation's."""
    import optuna

    from hpo.config.study_config import load_study
    from hpo.device import probe_device
    from hpo.trial.executor import Executor

    wall.write(rows)
    path = rows / "study.yaml"
    path.write_text(yaml.safe_dump(wall.study(rows, 42, pruner={"name": "none"})))
    executor = Executor(load_study(path), probe_device("cpu"), rows / "runs")
    sampler = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=42))
    runs = []
    for number in range(num_runs):
        params = suggest(sampler.ask())
        result = executor.run(params, None, "")
        score = None if result.values is None else round(result.values[0], 6)
        runs.append({"score": score, "outcome": result.outcome, "params": params})
        print(f"{number + 1} of {num_runs}: {score} {params}", file=sys.stderr, flush=True)
    return runs


def write_exhausted(arguments: argparse.Namespace) -> None:
    name = arguments.set
    workload = Workload(name, name, (TASKS[name],), 64, (1, 2), arguments.train, arguments.validation)
    wall = Wall(workload, arguments.epochs)
    with tempfile.TemporaryDirectory() as folder:
        runs = exhaust(wall, arguments.runs, Path(folder))
    store(wall, runs)


def store(wall: Wall, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write the file of a set, with what makes it again."""
    from hpo.device import probe_device

    workload, scores = wall.workload, [run["score"] for run in runs if run["score"] is not None]
    sizes = {"train": workload.num_train, "validation": workload.num_validation, "epochs": wall.epochs}
    options = " ".join(f"--{name} {value}" for name, value in {**sizes, "runs": len(runs)}.items())
    content = {
        "command": f"python tests/benchmarks/search_wall.py exhaust {workload.name} {options}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": probe_device("cpu").describe(),
        **asdict(wall),
        "best": max(scores),
        "num_at_target": sum(score >= max(scores) - MARGIN for score in scores),
        "num_runs": len(runs),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    of_runs = ",\n".join(map(json.dumps, runs))
    path = exhausted(workload.name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + f',\n"runs": [\n{of_runs}\n]\n}}\n')
    print(f"best {max(scores):.4f}, {content['num_at_target']} of {len(runs)} within half a point")


def exhausted(name: str) -> Path:
    return EXHAUSTED / f"{name}.json"


def target_of(name: str, margin: float = MARGIN) -> float:
    return float(json.loads(exhausted(name).read_text())["best"]) - margin
