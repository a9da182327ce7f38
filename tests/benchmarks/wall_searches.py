"""The searches of `search_wall.py`, each the main program of a process of its own.

    python tests/benchmarks/wall_searches.py CONTENDER ROWS SEED

ROWS is a folder with the rows and `wall.json`. What a peer's search scores on validation it appends to
`scores.jsonl` where it runs, an evaluation a line. All search one space on one encoder for the same epochs in
fp32, with AdamW and the learning rate that falls to 0, evaluate after each epoch, and have their defaults in
what is not named here: Optuna's TPE and `MedianPruner`, Trainer's clipping, Lightning's loop. A score is that
of `hpo.training.metrics` for all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from wall import Wall, suggest

if TYPE_CHECKING:
    from torch import Tensor

SCORES = "scores.jsonl"
MANY = 10_000
"""Trials: a search is ended from outside."""


def note(score: float) -> None:
    """Append what an evaluation scored to the file that is watched."""
    with Path(SCORES).open("a") as lines:
        lines.write(f"{score}\n")


@dataclass(frozen=True)
class Search:
    """What a peer is to search."""

    rows: Path
    seed: int

    @cached_property
    def wall(self) -> Wall:
        return Wall.read(self.rows / "wall.json")

    def optuna_study(self) -> optuna.Study:
        """Its pruner is Optuna's default, `MedianPruner`."""
        return optuna.create_study(direction="maximize", **self.sampler())

    def sampler(self) -> dict[str, Any]:
        """Optuna's default with a seed."""
        return {"sampler": optuna.samplers.TPESampler(seed=self.seed)}

    @cached_property
    def scorer(self) -> Callable[[Any], float]:
        """The score of logits [N, C] of the validation rows, which is noted."""
        from hpo.data.tasks import parse_tasks
        from hpo.tasks.example import Example
        from hpo.training.metrics import score

        (task,) = parse_tasks(json.loads((self.rows / "tasks.json").read_text()), "tasks.json")
        with (self.rows / "validation.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        known = frozenset({task.name})
        examples = [Example(row["id"], row["text"], row["labels"], {}, annotated=known) for row in rows]

        def of_logits(logits_NC: Any) -> float:
            predictions = [task.labels[index] for index in logits_NC.argmax(-1).tolist()]
            found = score(task, predictions, examples)[task.primary_metric]
            note(found)
            return found

        return of_logits


def run_trainer(search: Search) -> None:
    """`Trainer.hyperparameter_search`, whose backend is Optuna."""
    from peers import PeerModel, pad, read_split, read_tasks, trainer_arguments
    from transformers import PrinterCallback, Trainer

    workload, epochs = search.wall.workload, search.wall.epochs
    tasks = read_tasks(search.rows)

    def hp_space(trial: optuna.Trial) -> dict[str, Any]:
        params = suggest(trial)
        return {
            "learning_rate": params["learning_rate"],
            "per_device_train_batch_size": params["batch_size"],
            "warmup_steps": params["warmup_ratio"],  # below 1 it is a share
            "weight_decay": params["weight_decay"],
        }

    # A searched value becomes one of the type that the argument has: of an integer 0 it would stay 0.
    more = {"num_train_epochs": epochs, "seed": search.seed, "warmup_steps": 0.0}
    quiet = {"eval_strategy": "epoch", "logging_strategy": "no"}
    trainer = Trainer(
        model_init=lambda: PeerModel(tasks, workload.encoder, search.seed),
        args=trainer_arguments(workload, "fp32", "trainer", **more, **quiet),
        data_collator=pad,
        train_dataset=read_split(search.rows, "train", workload.max_length),
        eval_dataset=read_split(search.rows, "validation", workload.max_length),
        compute_metrics=lambda found: {"score": search.scorer(found.predictions[0])},
    )
    trainer.remove_callback(PrinterCallback)
    trainer.hyperparameter_search(
        hp_space,
        lambda metrics: metrics["eval_score"],
        MANY,
        direction="maximize",
        backend="optuna",
        **search.sampler(),
    )


def run_lightning(search: Search) -> None:
    """A Lightning Trainer for each trial, and a callback that prunes, as in Optuna's example."""
    import lightning as L
    import torch
    from peers import PeerModel, fit_lightning, pad, read_split, read_tasks
    from torch.utils.data import DataLoader
    from transformers import get_linear_schedule_with_warmup

    workload, epochs = search.wall.workload, search.wall.epochs
    tasks = read_tasks(search.rows)
    train, validation = (
        read_split(search.rows, split, workload.max_length) for split in ("train", "validation")
    )

    class Pruning(L.Callback):
        """Scores each epoch and reports it, as Optuna's `PyTorchLightningPruningCallback` does."""

        def __init__(self, trial: optuna.Trial) -> None:
            self.trial = trial
            self.score = 0.0
            self.logits: list[Tensor] = []

        def on_validation_batch_end(
            self, _trainer: Any, _module: Any, outputs: Any, *_: Any, **__: Any
        ) -> None:
            self.logits.append(outputs["logits"][0])

        def on_validation_end(self, trainer: Any, _module: Any) -> None:
            logits_NC = torch.cat(self.logits)
            self.logits.clear()
            if not trainer.sanity_checking:
                self.score = search.scorer(logits_NC)
                self.trial.report(self.score, trainer.current_epoch)
                if self.trial.should_prune():
                    raise optuna.TrialPruned

    def objective(trial: optuna.Trial) -> float:
        params = suggest(trial)
        torch.manual_seed(search.seed)

        def optimizers(parameters: Any) -> dict[str, Any]:
            adamw = torch.optim.AdamW(
                parameters, lr=params["learning_rate"], weight_decay=params["weight_decay"]
            )
            num_steps = epochs * len(batches)
            warmup = round(params["warmup_ratio"] * num_steps)
            schedule = get_linear_schedule_with_warmup(adamw, warmup, num_steps)
            return {"optimizer": adamw, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        batches = DataLoader(train, params["batch_size"], shuffle=True, collate_fn=pad)
        model, pruning = PeerModel(tasks, workload.encoder, search.seed), Pruning(trial)
        fit_lightning(
            model,
            optimizers,
            "fp32",
            [batches, DataLoader(validation, 8, collate_fn=pad)],
            max_epochs=epochs,
            callbacks=[pruning],
        )
        return pruning.score

    search.optuna_study().optimize(objective, n_trials=MANY)


def run_plain(search: Search) -> None:
    """Optuna's own loop around our executor."""
    import yaml

    from hpo.config.resolved_study import resolve_study
    from hpo.config.study_config import load_study
    from hpo.device import probe_device
    from hpo.errors import Pruned
    from hpo.trial.executor import Executor
    from hpo.trial.telemetry import Callbacks

    path = Path("plain.yaml")
    path.write_text(yaml.safe_dump(search.wall.study(search.rows, search.seed, pruner={"name": "none"})))
    resolved = resolve_study(load_study(path), probe_device("cpu"))
    executor = Executor(resolved, Path("runs"))

    def objective(trial: optuna.Trial) -> float:
        def on_evaluation(scored: Any) -> None:
            note(scored.values[0])
            trial.report(scored.values[0], scored.index)
            if trial.should_prune():
                raise Pruned("as Optuna's pruner says")

        folder = Path("runs", str(trial.number))
        result = executor.run(suggest(trial), folder, folder.name, Callbacks(on_evaluation))
        if result.values is None:  # pruned, or not finite
            raise optuna.TrialPruned(result.reason)
        return float(result.values[0])

    search.optuna_study().optimize(objective, n_trials=MANY)


PEERS: dict[str, Callable[[Search], None]] = {
    "trainer": run_trainer,
    "lightning": run_lightning,
    "plain": run_plain,
}


def main() -> None:
    name, rows, seed = sys.argv[1:]
    PEERS[name](Search(Path(rows), int(seed)))


if __name__ == "__main__":
    main()
