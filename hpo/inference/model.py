"""A trained model in use: texts in, labels, numbers and spans out.

What decides a prediction is that of the trial: how a text is cut into windows, the precision, the thresholds,
the joining of windows. Nothing of it is written a second time: texts become examples without truth, and go
through the tokenisation, the batches and the decoding of an evaluation. So a prediction here is the one that
`hpo best --evaluate` scores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils.generic import ModelOutput

from hpo.code import name_code
from hpo.data.batches import evaluation_batches
from hpo.data.examples import RowChecker, problem_list
from hpo.data.tokenization import tokenize_chunks
from hpo.device import DeviceInfo, probe_device
from hpo.errors import DataError, InputError, ModelError, RunError, did_you_mean
from hpo.inference.onnx_network import OnnxNetwork, has_cuda_provider, load_onnx
from hpo.inference.packed_linear import PackedLinears
from hpo.models.export import ExportSettings, load_exported, read_metadata
from hpo.models.model_parts import set_float32_parts
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.table import PRECISIONS, AmpConfig, Precision, base_lacks, canonical_precision, support
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import LENGTH_MULTIPLE, TokenizedSplit
from hpo.training.decoding import class_probabilities, decode_tasks
from hpo.training.evaluate import predict_logits

CPU_TOKENS = 512
"""Tokens of a batch on a CPU in fp32: MiniLM on an EPYC predicts 30 texts/s with 512, 20 with 8192."""
_logger = logging.getLogger("hpo.inference")


@dataclass
class MultitaskOutput(ModelOutput):
    """What `TrainedModel.forward` returns."""

    logits: dict[str, Tensor] | None = None
    """By task: [batch, classes] of sequence tasks, [batch, tokens, outputs] of token tasks."""

    def __post_init__(self) -> None:  # that of transformers would take the tasks for its own fields
        self["logits"] = self.logits


@dataclass(frozen=True)
class PredictedSpan:
    """A piece of a text: `text[start:end]`, counted in characters, under a name."""

    name: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class TaskPrediction:
    """What the model says of one text for one task; a kind of task fills what it has."""

    label: str | list[str] | float | None = None
    """single_label: a class; multi_label: a list of classes; regression: a number."""
    scores: dict[str, float] = field(default_factory=dict)
    """single_label and multi_label: the probability of each class."""
    spans: list[PredictedSpan] = field(default_factory=list)
    """The kinds that find spans: those found, in the order of the text."""


Prediction = dict[str, TaskPrediction]
"""What the model says of one text, by task."""


class TrainedModel(nn.Module):
    """The model of a trial with its tokenizer, windows, precision and thresholds; `hpo.load` makes it."""

    def __init__(
        self,
        network: MultitaskModel | OnnxNetwork,
        tokenizer: PreTrainedTokenizerBase,
        settings: ExportSettings,
    ) -> None:
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.settings = settings
        self.decisions = {name: DecodingThresholds(**of) for name, of in settings.decisions.items()}
        self._precision = PRECISIONS["fp32"]
        self._device_info = probe_device("cpu")
        self._packed = PackedLinears()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What the model was trained for."""
        return self.network.tasks

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        network = self.network
        return network.device if isinstance(network, OnnxNetwork) else next(network.parameters()).device

    @property
    def precision(self) -> str:
        """The precision that the model computes in now; `int8` of an ONNX model that is quantised."""
        network = self.network
        return network.settings.precision if isinstance(network, OnnxNetwork) else self._precision.name

    def use(self, device: str, precision: str | None = None) -> TrainedModel:
        """Move the model to a device (`auto`, `cpu`, `cuda`, `cuda:1`) and choose the precision there.

        Without `precision` it is that of the trial, or fp32 with a warning where the device lacks it. An ONNX
        model has one precision, and `auto` is the CPU for it where onnxruntime was built without CUDA.
        Raises InputError where there is no such device, ModelError where it cannot run the `precision`.
        """
        info = _described(device)
        if isinstance(self.network, OnnxNetwork):
            self.network.check_precision(precision)
            if device == "auto" and info.type == "cuda" and not has_cuda_provider():
                info = _described("cpu")
            self._device_info = info
            return self.to(info.torch_device)
        wanted = _precision_for(info, self.settings.precision, precision)
        if self.settings.base is not None:
            wanted = replace(wanted, frozen=self.settings.base.precision)
            if lacking := base_lacks(wanted.frozen, info):
                raise InputError(lacking)
        if self._precision != wanted:
            if self._precision.float8:
                raise ModelError("a model in fp8 cannot change its precision: load it again with `hpo.load`.")
            set_float32_parts(self.network, self.settings.fp32_parts if wanted.autocast else ())
            self.network = cast(MultitaskModel, prepare_model(self.network, wanted))
        self._precision, self._device_info = wanted, info
        return self.to(info.torch_device)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> MultitaskOutput:
        """The logits of one batch of windows, all arguments [batch, tokens] as `tokenizer` makes them.

        Texts longer than the model's windows must be cut before: `predict` does all of it.
        """
        with self._flags(), self._mixed_precision().autocast():
            return MultitaskOutput(logits=self.network(input_ids, attention_mask, token_type_ids))

    def predict(
        self,
        texts: Sequence[str | Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        skip_bad_rows: bool = False,
    ) -> list[Prediction]:
        """What the model says of each text, by task, in the order of `texts`.

        A text of a model with `pair_segments` is a row of data: `{"text": ..., "segments": {...}}`. Texts of
        any length are cut as in training; batches hold texts of similar length, at most `max_tokens` tokens
        with padding (left out: as in the study's evaluations, less on a CPU in fp32). `skip_bad_rows` gives a
        text that is empty or none the prediction `{}`, with a warning.

        Raises DataError for such a text without `skip_bad_rows`, RunError where logits are not finite.
        """
        if isinstance(texts, str | Mapping):
            raise DataError("predict takes a list of texts, but got one text. Write predict([text]).")
        examples: list[Example | None] = []
        bad: list[tuple[str, str]] = []
        for i, text in enumerate(texts):
            example, problems = self.example({"text": text} if isinstance(text, str) else text, str(i))
            examples.append(example)
            if problems:
                bad.append((f"texts[{i}]", "; ".join(problems)))
        if bad and not skip_bad_rows:
            raise DataError(
                f"{': '.join(bad[0])}. With skip_bad_rows=True such a text has the prediction {{}}."
            )
        if bad:
            what = "%d of %d texts cannot be read and have no prediction:%s"
            _logger.warning(what, len(bad), len(examples), problem_list(bad))
        good = [example for example in examples if example is not None]
        chunks = self.predict_examples(good, max_tokens=max_tokens)
        predictions = (one for chunk in chunks for one in chunk)
        return [{} if example is None else next(predictions) for example in examples]

    def example(self, row: object, row_id: str) -> tuple[Example | None, list[str]]:
        """A row of data as the model reads it, its truth left aside; or None and what is wrong with it.

        `row_id` is the id of a row that has none.
        """
        if isinstance(row, Mapping):
            given = row.get("id")
            read = {key: row[key] for key in ("text", "segments") if key in row}
            row = {"id": row_id if given is None else given, **read}
        return RowChecker((), self.settings.windowing.pair_segments, {}).check(row)

    def predict_examples(
        self,
        examples: Sequence[Example],
        *,
        max_tokens: int | None = None,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> Iterator[list[Prediction]]:
        """As `predict`, in chunks of thousands of texts, of examples that `example` has made.

        `on_progress` is told, before each batch, how many examples are done.
        """
        if max_tokens is None:
            max_tokens = self._default_max_tokens()
        if max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, but got {max_tokens}.")
        if not examples:
            return
        done = 0
        for split in tokenize_chunks(examples, self.tasks, self.tokenizer, self.settings.windowing):
            if split.num_cut_examples:
                _logger.warning(
                    "%d of %d texts are longer than %d tokens and lose their end, as in training",
                    split.num_cut_examples,
                    len(split.examples),
                    self.settings.windowing.max_length,
                )
            yield self._predict_split(split, max_tokens, done, on_progress)
            done += len(split.examples)
        on_progress(done)

    def _default_max_tokens(self) -> int:
        """The study's, so that the batches are those of its evaluations: under a reduced precision they move
        a probability by 1e-4 and more. In fp32 they do not, and a CPU is fastest with small ones. So has
        an ONNX model, though other batches move its logits where int8 has the ranges of each batch.
        """
        is_free = self._precision.name == "fp32" and self.device.type == "cpu"
        return min(CPU_TOKENS, self.settings.batch_tokens) if is_free else self.settings.batch_tokens

    def _predict_split(
        self, split: TokenizedSplit, max_tokens: int, done: int, on_progress: Callable[[float], None]
    ) -> list[Prediction]:
        num_batches = len(evaluation_batches(split.lengths_W, max_tokens))
        begun = count()

        def on_batch() -> None:
            on_progress(done + min(1.0, next(begun) / num_batches) * len(split.examples))

        logits = self.logits(split, max_tokens=max_tokens, on_batch=on_batch)
        self._check_finite(logits)
        return predictions_of(self.tasks, logits, split, self.decisions)

    def logits(
        self,
        split: TokenizedSplit,
        *,
        max_tokens: int | None = None,
        on_batch: Callable[[], None] = lambda: None,
    ) -> dict[str, NDArray[np.float32]]:
        """The logits of a whole split by task, as `predict_logits` gives them, maybe not finite.

        `max_tokens` as in `predict`; `on_batch` runs before each batch.
        """
        few_shapes = self.device.type == "cuda"
        batches = evaluation_batches(split.lengths_W, max_tokens or self._default_max_tokens())
        is_exact = self._precision.name == "fp32"
        with self._flags(), self._packed.used_in(self.network) if is_exact else nullcontext():
            return predict_logits(
                self.network,
                replace(split, length_multiple=LENGTH_MULTIPLE if few_shapes else 1),
                batches,
                self._mixed_precision(),
                self.tokenizer.pad_token_id or 0,
                on_batch,
            )

    def _check_finite(self, logits: Mapping[str, NDArray[np.float32]]) -> None:
        broken = [name for name, values in logits.items() if not np.isfinite(values).all()]
        if broken:
            is_onnx = isinstance(self.network, OnnxNetwork)
            hint = "Use its PyTorch export." if is_onnx else "Load it with another precision, such as fp32."
            raise RunError(
                f"the model's logits are not finite in {self.precision}. Tasks: {', '.join(broken)}. {hint}"
            )

    def _mixed_precision(self) -> MixedPrecision:
        info = self._device_info
        if info.torch_device != str(self.device):  # moved by `to` or `cuda`, which leave the precision
            info = _described(str(self.device))
        return MixedPrecision(self._precision, self._amp_config(), info)

    def _flags(self) -> AbstractContextManager[None]:
        return backend_flags(self._precision, self._amp_config())

    def _amp_config(self) -> AmpConfig:
        return AmpConfig(tf32=self.settings.tf32)


def load(
    directory: str | Path,
    *,
    device: str = "auto",
    precision: str | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    code: str | Path | Sequence[str | Path] = (),
) -> TrainedModel:
    """The model in a folder that `hpo best --export` or `hpo deploy` wrote.

    `device` is `auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:1`. The model computes in the
    precision of its trial, or in fp32 with a warning where the device has no instructions for that;
    `precision` asks for another. `attention` replaces the trial's implementation. An ONNX export computes by
    onnxruntime, in the precision and with the attention that it was written with; `auto` is the CPU for it
    where onnxruntime was built without CUDA. Nothing of the folder is run as code, unless `trust_remote_code`
    allows that of its encoder, and `code` names the files or modules of the study's own code.

    Raises InputError where that code is missing or another, ModelError where the folder is no intact export
    of this version, or the device cannot run the `precision`.
    """
    _described(device)
    for one in [code] if isinstance(code, str | Path) else code:
        try:
            name_code(str(one))
        except ValueError as error:
            raise InputError(f"code: {error}") from None
    folder = Path(directory).resolve()
    network: MultitaskModel | OnnxNetwork
    if read_metadata(folder)["runtime"] == "onnx":
        if attention is not None:
            raise ModelError(f"{folder} is an ONNX export, whose attention is fixed. Leave `attention` out.")
        network, tokenizer, settings = load_onnx(folder, trust_remote_code=trust_remote_code)
    else:
        network, tokenizer, settings = load_exported(
            folder, attention=attention, trust_remote_code=trust_remote_code
        )
    return TrainedModel(network, tokenizer, settings).use(device, precision)


def _described(device: str) -> DeviceInfo:
    """The device of this name. Raises InputError where there is none."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be auto, cpu, cuda or cuda:N, but got {device!r}.")
    if kind != "cuda" or not index:
        return probe_device(kind)
    if not index.isdecimal() or int(index) >= torch.cuda.device_count():
        raise InputError(f"there is no device {device!r} here: CUDA has {torch.cuda.device_count()}.")
    with torch.cuda.device(int(index)):
        return probe_device(kind)


def _precision_for(device: DeviceInfo, trained: str, asked: str | None) -> Precision:
    if asked is None:
        supported = support(trained, device)
        if supported.level == "native":
            return PRECISIONS[trained]
        _logger.warning("%s The model runs in fp32 here.", supported.reason)
        return PRECISIONS["fp32"]
    try:
        name = canonical_precision(asked)
    except ValueError:
        hint = did_you_mean(asked, list(PRECISIONS))
        raise InputError(f"precision: there is no {asked!r}.{hint}") from None
    supported = support(name, device)
    if supported.level == "unsupported":
        raise ModelError(supported.reason)
    return PRECISIONS[name]


def predictions_of(
    tasks: Sequence[Task],
    logits: Mapping[str, NDArray[np.float32]],
    split: TokenizedSplit,
    decisions: Mapping[str, DecodingThresholds],
) -> list[Prediction]:
    """What the finite `logits` of `predict_logits` say of each example of the split, in its order."""
    decisions = decisions or {task.name: DecodingThresholds() for task in tasks}
    labels, _ = decode_tasks(tasks, logits, split, decisions)
    probabilities = class_probabilities(tasks, logits, split)
    return [_prediction(tasks, labels, probabilities, e, example) for e, example in enumerate(split.examples)]


def _prediction(
    tasks: Sequence[Task],
    decoded: Mapping[str, Sequence[Any]],
    probabilities: Mapping[str, NDArray[np.float64]],
    e: int,
    example: Example,
) -> Prediction:
    """That of one example, the `e`-th."""
    prediction: Prediction = {}
    for task in tasks:
        answer = decoded[task.name][e]
        if KINDS[task.kind].in_spans:
            spans = [PredictedSpan(name, start, end, example.text[start:end]) for name, start, end in answer]
            prediction[task.name] = TaskPrediction(spans=spans)
        else:
            of_classes = probabilities.get(task.name)
            values = () if of_classes is None else zip(task.labels, of_classes[e].tolist(), strict=True)
            prediction[task.name] = TaskPrediction(answer, dict(values))
    return prediction
