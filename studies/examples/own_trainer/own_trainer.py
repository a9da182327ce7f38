"""`transformers.Trainer` as the training loop of a trial: `code: own_trainer.py`. Needs accelerate."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hpo


def rows(number, seed):
    """Sequences of tokens with the class 1 if the first token is a high one."""
    tokens = torch.randint(1, 40, (number, 8), generator=torch.Generator().manual_seed(seed))
    labels = (tokens[:, 0] > 20).long()
    return [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]


class Reports(TrainerCallback):
    """Reports each evaluation once Trainer has saved its checkpoint, so that both are of the same step."""

    def __init__(self, run):
        self.run, self.metrics = run, {}

    def on_evaluate(self, *_, metrics, **__):
        self.metrics = {"accuracy": metrics["eval_accuracy"], "loss": metrics["eval_loss"]}

    def on_step_end(self, args, *_, **__):
        self.run.count_step(args.train_batch_size)

    def on_save(self, _, state, *__, **___):
        self.run.report(self.metrics, done=state.global_step / state.max_steps)


@hpo.trial
def train(run):
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = BertForSequenceClassification(config)
    run.observe(model)  # ends the trial if Trainer computes in another precision
    run.keep(model=model)  # the best weights
    arguments = TrainingArguments(
        output_dir=str(run.folder),
        use_cpu=run.device.type == "cpu",
        bf16=run.precision.name == "bf16",
        fp16=run.precision.name == "fp16",
        learning_rate=run.params["learning_rate"],
        num_train_epochs=run.params["epochs"],
        per_device_train_batch_size=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=3,
        seed=run.params["seed"],
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows(200, seed=0),
        eval_dataset=rows(100, seed=1),
        compute_metrics=lambda given: {"accuracy": (given.predictions.argmax(1) == given.label_ids).mean()},
        callbacks=[Reports(run)],
    )
    trainer.remove_callback(PrinterCallback)
    # Trainer's checkpoint of the last report; there is none in a new trial.
    last = run.folder / f"checkpoint-{run.step}"
    trainer.train(resume_from_checkpoint=str(last) if last.is_dir() else None)
