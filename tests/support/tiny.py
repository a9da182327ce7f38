"""A study that is small enough to train in a second: a fresh two-layer BERT on generated posts."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import StudyConfig, load_study
from hpo.config.trial_config import TrialConfig
from hpo.data.batches import Batch
from hpo.device import DeviceInfo
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import HeadSettings, MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS, AmpConfig, Resolution
from hpo.tasks.kind import Task
from hpo.tasks.options import LossOptions
from hpo.training.losses import MultitaskLoss
from hpo.trial.executor import Executor
from hpo.trial.measure import Measurement, measure
from hpo.trial.parts import TrialParts, build_trial

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ENCODER: dict[str, Any] = {"model_type": "bert", "hidden_size": 32, **SIZES}
CPU = DeviceInfo(type="cpu", name="test CPU", torch_version=torch.__version__)
GPU = DeviceInfo(
    type="cuda", name="Example GPU", compute_capability=(9, 0), total_memory_bytes=80 * 2**30, uuid="GPU-0"
)
CPU_PRECISIONS = [name for name in PRECISIONS if name not in ("tf32", "fp8")]
EMULATED = AmpConfig(allow_emulated=True, track_stats=True, fallback_to_fp32=False)
TRAINING: dict[str, Any] = {"max_steps": 4, "batch_size": 8, "max_length": 64, "dropout": 0.0}

TASKS = (
    Task("topic", "single_label", ("a", "b", "c")),
    Task("tags", "multi_label", ("x", "y")),
    Task("slots", "token_classification", ("name",)),
    Task("size", "regression", ()),
)


def write_study(folder: Path, **changes: Any) -> Path:
    """A study file in `folder`; `changes` replace its top-level keys."""
    content: dict[str, Any] = {
        "name": "tiny",
        "n_trials": 2,
        "sampler": {"name": "random", "seed": 1},
        "pruner": {"name": "none"},
        "data": {
            "source": "synthetic",
            "synthetic": {"num_train": 48, "num_validation": 24, "num_test": 24, "max_sentences": 4},
        },
        "model": {"encoder": ENCODER},
        "training": TRAINING,
        "amp": {"allow_emulated": True},
        "search_space": {"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-3, "log": True}},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


def write_long_study(
    folder: Path,
    every_seconds: float,
    n_trials: int = 2,
    per_trial: int = 1,
    pruner: dict[str, Any] = {"name": "none"},  # noqa: B006
    **budget: float,
) -> Path:
    """Of trials that last long enough to be met in the middle, with a checkpoint `every_seconds`."""
    return write_study(
        folder,
        n_trials=n_trials,
        pruner=pruner,
        training={"batch_size": 8, "max_length": 64, "fp_precision": "fp32", **budget},
        evaluation={"per_trial": per_trial},
        checkpoint={"top_k": 9, "every_seconds": every_seconds},
    )


def tiny_study(folder: Path, **changes: Any) -> StudyConfig:
    return load_study(write_study(folder, **changes))


def study_of(**keys: Any) -> StudyConfig:
    """Return a study without a file."""
    return StudyConfig.model_validate({"name": "s", "data": {"source": "synthetic"}, **keys})


def executor_of(path: Path, device: DeviceInfo = CPU) -> Executor:
    """Return the executor of a study file, with its runs beside it."""
    return Executor(resolve_study(load_study(path), device), path.parent / "runs")


def tiny_executor(folder: Path, device: DeviceInfo = CPU, **changes: Any) -> Executor:
    return executor_of(write_study(folder, **changes), device)


def parts_of(executor: Executor, **params: Any) -> TrialParts:
    return build_trial(executor.resolved, params, executor.loader)


def altered_executor(
    folder: Path, alter: Callable[[MultitaskModel], object], device: DeviceInfo = CPU, **study: Any
) -> Executor:
    """An executor whose models are changed as they are built."""
    executor = tiny_executor(folder, device, **study)
    build_model = executor.loader.build_model

    def build_and_alter(config: TrialConfig) -> MultitaskModel:
        model = build_model(config)
        with torch.no_grad():
            alter(model)
        return model

    executor.loader.build_model = build_and_alter
    return executor


class TinyEncoder(torch.nn.Module):
    """Stands in for a Hugging Face encoder: an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=16, initializer_range=0.02)
        self.embedding, self.dense = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=torch.tanh(self.dense(self.embedding(input_ids))))


def tiny_model(encoder: torch.nn.Module | None = None) -> MultitaskModel:
    torch.manual_seed(0)
    return MultitaskModel(encoder or TinyEncoder(), TASKS, HeadSettings(head_dropout=0.0))


def tiny_batch(num: int = 6, length: int = 8, seed: int = 0) -> Batch:
    """Windows of different lengths; some rows lack the label of `topic` or of `size`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = np.array([length - (i % 3) for i in range(num)])
    mask = torch.arange(length) < torch.as_tensor(lengths)[:, None]
    topic = torch.randint(0, 3, (num,), generator=generator)
    topic[::3] = -100
    size = torch.randn(num, generator=generator)
    size[::2] = float("nan")
    slots = torch.randint(0, 3, (num, length), generator=generator)
    slots[~mask] = -100
    slots[:, 0] = -100
    return Batch(
        input_ids_BL=torch.randint(1, 50, (num, length), generator=generator) * mask,
        attention_mask_BL=mask.long(),
        type_ids_BL=None,
        targets={
            "topic": topic,
            "tags": torch.randint(0, 2, (num, 2), generator=generator).float(),
            "slots": slots,
            "size": size,
        },
        windows_B=np.arange(num),
        lengths_B=lengths,
    )


def amp_of(name: str, device: DeviceInfo = CPU, **changes: Any) -> MixedPrecision:
    return MixedPrecision(PRECISIONS[name], EMULATED.model_copy(update=changes), device)


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Check that weights, buffers, gradients and modes stay as they are."""
    tensors, modes = [*model.parameters(), *model.buffers()], [one.training for one in model.modules()]
    before = [tensor.clone() for tensor in tensors]
    yield
    after = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(after, tensors, strict=True))
    assert all(map(torch.equal, after, before))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [one.training for one in model.modules()] == modes


def wide_layer(model: MultitaskModel) -> None:
    """Make a feed-forward output exceed the largest number of fp16. The norm after it scales it down."""
    block: Any = encoder_layers(model.encoder)[1]
    torch.nn.init.constant_(block.intermediate.dense.bias, 10.0)
    torch.nn.init.normal_(block.output.dense.weight, std=1e4)


def tiny_objective(**options: Any) -> MultitaskLoss:
    return MultitaskLoss(TASKS, LossOptions(**options), {}, {})


def overflow_in_reduced_precision(model: MultitaskModel) -> None:
    """Make all logits infinite that are not in fp32."""
    factor = {torch.float32: 1.0}
    model.register_forward_hook(
        lambda _model, _inputs, logits: {
            name: value * factor.get(value.dtype, torch.inf) for name, value in logits.items()
        }
    )


def tiny_measurement(
    model: MultitaskModel, batch: Batch, loss_fn: MultitaskLoss, name: str, **amp: Any
) -> Measurement:
    """What the compatibility check finds of a model in the precision `name`."""
    parts: Any = SimpleNamespace(
        device=CPU,
        config=SimpleNamespace(amp=EMULATED.model_copy(update=amp)),
        resolution=Resolution(name, name, "emulated"),
        model=model,
        loss_fn=loss_fn,
        compile=None,
        build_reference=None,
    )
    return measure(parts, batch)


class CompatCache:
    """A compatibility cache of JSON, as in a database. It may be killed at a write."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}
        self.killed_at: int | None = None

    def get_compat(self, key: str) -> Any:
        return json.loads(self.stored.get(key, "null"))

    def put_compat(self, key: str, result: Any) -> Any:
        if len(self.stored) == self.killed_at:
            raise KeyboardInterrupt
        return json.loads(self.stored.setdefault(key, json.dumps(result)))
