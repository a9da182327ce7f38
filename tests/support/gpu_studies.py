"""Studies for the checks of `tests/gpu`: fresh encoders of known sizes, and texts of known lengths.

Nothing here needs a network or the weights of MiniLM. The weights are random, which changes no speed. The
tokenizer was trained on generated posts. As a program it runs the trial of STUDY and kills itself after a
step: tests/support/gpu_studies.py STUDY FOLDER STEP
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.data.synthetic import TASKS_JSON, SyntheticRows
from hpo.device import DeviceInfo, probe_device
from hpo.outcome import TrialResult
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks
from support.jsonl_sets import write_set
from support.tiny import write_study

TOKENIZER = Path(__file__).parents[1] / "gpu" / "tokenizer"
# (hidden size, layers, heads, intermediate size); `base` and `large` as published (arXiv 1810.04805)
SIZES = {
    "tiny": (32, 2, 2, 64),
    "small": (256, 2, 4, 1024),
    "wide": (1024, 2, 16, 4096),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
}
_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")

# Adam and clipping hide a wrong scale of the gradients. Here it changes the losses.
SGD = {"optimizer": "sgd", "learning_rate": 0.005, "max_grad_norm": 1000.0}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
TASKS = ("criteria", "severity")


def fresh_encoder(size: str) -> dict[str, Any]:
    """Return the `model.encoder` of a study with a fresh BERT."""
    return {
        "model_type": "bert",
        "tokenizer": str(TOKENIZER),
        "max_position_embeddings": 512,
        **({"vocab_size": 30522} if size in ("base", "large") else {}),
        **dict(zip(_NAMES, SIZES[size], strict=True)),
    }


def write_gpu_study(
    folder: Path,
    device: DeviceInfo,
    size: str,
    *,
    texts: tuple[int, tuple[int, int]] = (64, (2, 6)),
    training: dict[str, Any],
    **changes: Any,
) -> Path:
    """Study on `device` with an encoder of this size, and a multi-label and a single-label task.

    `texts` are (number of rows, sentences of a row).
    """
    num_train, (low, high) = texts
    splits = {
        split: [
            {"id": post.id, "text": post.text, "labels": {name: post.labels[name] for name in TASKS}}
            for post in SyntheticRows(split, num, min_sentences=low, max_sentences=high)
        ]
        for split, num in (("train", num_train), ("validation", 16))
    }
    tasks = {name: TASKS_JSON["tasks"][name] for name in TASKS}
    data = write_set(folder / "texts", {"tasks": tasks}, **splits)
    # A CPU may lack the instructions for bf16. A GPU must have them.
    amp = {"allow_emulated": device.type == "cpu"} | changes.pop("amp", {})
    defaults = {"batch_size": 16, "max_length": 64, "schedule": "constant", "warmup_ratio": 0.0, **NO_DROPOUT}
    return write_study(
        folder,
        device=device.type,
        data={"source": "jsonl", "path": str(data)},
        model={"encoder": fresh_encoder(size)},
        training=defaults | training,
        amp=amp,
        **changes,
    )


def run_trial(study: Path, folder: Path, killed_after: int | None = None) -> tuple[TrialResult, list[float]]:
    """Run the trial, or continue it from the checkpoint in `folder`; also return its losses by evaluation.

    A step has been given to the device when the process dies, but a GPU may still compute it.
    """
    config = load_study(str(study))
    executor = Executor(resolve_study(config, probe_device(config.device)), study.parent / "runs")
    losses: list[float] = []

    def die(progress: Any) -> None:
        if progress.part == "training" and progress.step == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks = Callbacks(on_evaluation=lambda scored: losses.append(scored.train_loss), on_progress=die)
    return executor.run({}, folder, "trial", callbacks), losses


def relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def largest_relative(values: Sequence[float], references: Sequence[float]) -> float:
    """The largest relative difference of two lists."""
    return max(map(relative, values, references))


if __name__ == "__main__":
    run_trial(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
