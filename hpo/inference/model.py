"""A trained model in use: texts in, labels, numbers and spans out.

Texts become examples without truth and go through the tokenisation, batches and decoding of an evaluation,
with the trial's windows, precision and thresholds. So `hpo best --evaluate` scores these same predictions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils.generic import ModelOutput

from hpo.code import name_code
from hpo.config.data_config import ColumnsConfig
from hpo.data.batches import evaluation_batches
from hpo.data.examples import RowChecker, problem_list
from hpo.data.tables import row_text
from hpo.data.tokenization import tokenize_chunks
from hpo.device import DeviceInfo, probe_device
from hpo.errors import DataError, InputError, ModelError, RunError, did_you_mean
from hpo.inference.onnx_network import OnnxNetwork, load_onnx
from hpo.inference.packed_linear import PackedLinears
from hpo.models.export import ExportSettings, load_exported, read_metadata
from hpo.models.model_parts import set_float32_parts
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.table import PRECISIONS, AmpConfig, Precision, base_lacks, canonical_precision, support
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import TokenizedSplit
from hpo.training.evaluate import class_probabilities, decode_tasks, predict_logits

CPU_TOKENS = 512
"""Tokens in a batch on a CPU in fp32: MiniLM on an EPYC predicts 30 texts/s with 512, 20 with 8192."""
LOG_SECONDS = 10.0
_logger = logging.getLogger("hpo.inference")


@dataclass
class MultitaskOutput(ModelOutput):
    """Output of `TrainedModel.forward`."""

    logits: dict[str, Tensor] | None = None
    """Logits of each task: [batch, classes], or [batch, tokens, outputs] for a token task."""

    def __post_init__(self) -> None:  # the base class would make the tasks its own fields
        self["logits"] = self.logits


@dataclass(frozen=True)
class PredictedSpan:
    """A named piece of a text: `text[start:end]`, in characters."""

    name: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class TaskPrediction:
    """Prediction for one text and one task."""

    label: str | list[str] | float | None = None
    """single_label: a class; multi_label: a list of classes; regression: a number."""
    scores: dict[str, float] = field(default_factory=dict)
    """single_label and multi_label: the probability of each class."""
    spans: list[PredictedSpan] = field(default_factory=list)
    """Token tasks: the spans, in the order of the text."""


Prediction = dict[str, TaskPrediction]
"""Predictions for one text, by task."""


class TrainedModel(nn.Module):
    """A trial's model with its tokenizer, windows, precision and thresholds. `hpo.load` returns it."""

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
        self.decisions = {name: DecodingThresholds(**one) for name, one in settings.decisions.items()}
        self._precision = PRECISIONS["fp32"]
        self._device_info = probe_device("cpu")
        self._packed = PackedLinears()
        self._amp = AmpConfig(tf32=settings.tf32)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks of the model."""
        return self.network.tasks

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        network = self.network
        return network.device if isinstance(network, OnnxNetwork) else next(network.parameters()).device

    @property
    def precision(self) -> str:
        """Current precision; `int8` for a quantised ONNX model."""
        network = self.network
        return network.settings.precision if isinstance(network, OnnxNetwork) else self._precision.name

    def use(self, device: str, precision: str | None = None) -> TrainedModel:
        """Move the model to a device (`auto`, `cpu`, `cuda`, `cuda:1`) and choose the precision there.

        The default is the trial's precision, or fp32 with a warning if the device lacks it. An ONNX model has
        one precision and runs on the CPU. Raises InputError if there is no such device, ModelError if it
        cannot run the precision, or if the present one has changed the weights.
        """
        info = _device_info(device)
        if isinstance(self.network, OnnxNetwork):
            self.network.check_precision(precision)
            return self.to("cpu" if device == "auto" else info.torch_device)
        chosen = _precision_for(info, self.settings.precision, precision)
        if self.settings.base is not None:
            chosen = replace(chosen, frozen=self.settings.base.precision)
            if lacking := base_lacks(chosen.frozen, info):
                raise InputError(lacking)
        if self._precision != chosen:
            now = self._precision
            if now.float8 or (now.changes_weights and now.name != self.settings.precision):
                raise ModelError(
                    f"a model in {now.name} cannot change its precision: load it again with `hpo.load`."
                )
            set_float32_parts(self.network, self.settings.fp32_parts if chosen.autocast else ())
            self.network = cast(MultitaskModel, prepare_model(self.network, chosen))
        self._precision, self._device_info = chosen, info
        return self.to(info.torch_device)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> MultitaskOutput:
        """Compute the logits of one batch of windows; arguments are [batch, tokens] from `tokenizer`.

        No text may be longer than a window: `predict` cuts texts itself.
        """
        with backend_flags(self._precision, self._amp), self._mixed_precision().autocast():
            return MultitaskOutput(logits=self.network(input_ids, attention_mask, token_type_ids))

    def predict(
        self,
        texts: Sequence[str | Sequence[str] | Mapping[str, Any]] | pd.DataFrame,
        *,
        max_tokens: int | None = None,
        skip_bad_rows: bool = False,
    ) -> list[Prediction]:
        """Predict each text, in the order of `texts`.

        A text may be a row with the columns of the study, or with `text` and `segments`; a pair `(first,
        second)`; or a list of tokens. Long texts are cut as in training. A batch has at most `max_tokens`
        tokens, padding included; the default is the study's, or fewer on a CPU in fp32. With `skip_bad_rows`
        an unreadable text gets `{}` and a warning.

        Raises DataError for an unreadable text, RunError if logits are not finite.
        """
        if isinstance(texts, str | Mapping):
            raise DataError("predict takes a list of texts, but got one text. Write predict([text]).")
        examples: list[Example | None] = []
        bad: list[tuple[str, str]] = []
        if isinstance(texts, pd.DataFrame):
            texts = texts.astype(object).where(texts.notna(), None).to_dict("records")
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
            message = "%d of %d texts cannot be read and have no prediction:%s"
            _logger.warning(message, len(bad), len(examples), problem_list(bad))
        good = [example for example in examples if example is not None]
        chunks = self.predict_examples(good, max_tokens=max_tokens)
        predictions = (one for chunk in chunks for one in chunk)
        return [{} if example is None else next(predictions) for example in examples]

    def example(self, row: object, row_id: str) -> tuple[Example | None, list[str]]:
        """Read a row of data without its labels. Returns the example, or None and the row's problems.

        `row_id` is the id of a row without one.
        """
        columns, pair = self.columns, self.settings.windowing.pair_segments
        if isinstance(row, list | tuple) and (columns.tokens or len(row) == len(columns.texts) == 2):
            row = dict(zip(columns.texts, [row] if columns.tokens else row, strict=True))
        if isinstance(row, Mapping):
            given = row.get("id", row.get(columns.id))
            inputs = {key: row[key] for key in ("text", "segments") if key in row}
            try:
                inputs = row_text(row, columns) if {*columns.texts} <= row.keys() else inputs
            except ValueError as error:
                return None, [str(error)]
            row = {"id": row_id if given is None else given, **inputs}
        return RowChecker((), pair, {}).check(row)

    @property
    def columns(self) -> ColumnsConfig:
        """The columns of `id` and the texts in tables: those of the study, or the names of its segments."""
        names = {key: name for key, name in self.settings.columns.items() if name is not None}
        pair = self.settings.windowing.pair_segments
        return ColumnsConfig.model_validate(names | ({"text": pair} if pair else {}))

    def predict_examples(
        self, examples: Sequence[Example], *, max_tokens: int | None = None
    ) -> Iterator[list[Prediction]]:
        """Predict the results of `example`, in chunks of thousands of texts. Logs the progress."""
        if max_tokens is None:
            max_tokens = self._default_max_tokens()
        if max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, but got {max_tokens}.")
        if not examples:
            return
        done, log_progress = 0, _progress_logger(len(examples))
        for split in tokenize_chunks(examples, self.tasks, self.tokenizer, self.settings.windowing):
            if split.num_cut_examples:
                _logger.warning(
                    "%d of %d texts are longer than %d tokens and lose their end, as in training",
                    split.num_cut_examples,
                    len(split.examples),
                    self.settings.windowing.max_length,
                )
            num = len(split.examples)
            on_batch = partial(lambda done, num, share: log_progress(done + num * share), done, num)
            logits = self.logits(split, max_tokens=max_tokens, on_batch=on_batch)
            self._check_finite(logits)
            yield _predictions(self.tasks, logits, split, self.decisions)
            done += num

    def _default_max_tokens(self) -> int:
        """Return the study's batch size, except for fp32 on a CPU, which is fastest with small batches.

        Under a reduced precision, other batches than the evaluation's move a probability by 1e-4 and more.
        """
        is_free = self._precision.name == "fp32" and self.device.type == "cpu"
        return min(CPU_TOKENS, self.settings.batch_tokens) if is_free else self.settings.batch_tokens

    def logits(
        self,
        split: TokenizedSplit,
        *,
        max_tokens: int | None = None,
        on_batch: Callable[[float], None] = lambda _: None,
    ) -> dict[str, NDArray[np.float32]]:
        """Compute the logits of a whole split, by task. They may be not finite.

        Calls `on_batch` before each batch, see `predict_logits`.
        """
        batches = evaluation_batches(split.lengths_W, max_tokens or self._default_max_tokens())
        is_exact = self._precision.name == "fp32"
        with (
            backend_flags(self._precision, self._amp),
            self._packed.used_in(self.network) if is_exact else nullcontext(),
        ):
            return predict_logits(
                self.network,
                replace(split, has_few_lengths=self.device.type == "cuda"),
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
        if info.torch_device != str(self.device):  # after `to` or `cuda`, which keep the precision
            info = _device_info(str(self.device))
        return MixedPrecision(self._precision, self._amp, info)


def load(
    directory: str | Path,
    *,
    device: str = "auto",
    precision: str | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    code: str | Path | Sequence[str | Path] = (),
) -> TrainedModel:
    """Load the model from a folder of `hpo best --export` or `hpo deploy`.

    `device` is `auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:1`. The default `precision` is the
    trial's, or fp32 with a warning if the device has no instructions for it. `attention` replaces the trial's
    implementation. An ONNX export runs on the CPU, with its own precision and attention. The folder's code
    runs only with `trust_remote_code`. `code` names the files or modules of the study's own code.

    Raises InputError if that code is missing or differs. Raises ModelError if the folder is no intact export
    of this version, or the device cannot run the precision.
    """
    _device_info(device)
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


def _device_info(device: str) -> DeviceInfo:
    """Describe a device by its name. Raises InputError if there is none."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be auto, cpu, cuda or cuda:N, but got {device!r}.")
    if kind != "cuda" or not index:
        return probe_device(kind)
    if not index.isdecimal() or int(index) >= torch.cuda.device_count():
        raise InputError(f"there is no device {device!r} here: CUDA has {torch.cuda.device_count()}.")
    with torch.cuda.device(int(index)):
        return probe_device(kind)


def _precision_for(device: DeviceInfo, trained: str, requested: str | None) -> Precision:
    if requested is None:
        supported = support(trained, device)
        if supported.level == "native":
            return PRECISIONS[trained]
        _logger.warning("%s The model runs in fp32 here.", supported.reason)
        return PRECISIONS["fp32"]
    try:
        name = canonical_precision(requested)
    except ValueError:
        hint = did_you_mean(requested, list(PRECISIONS))
        raise InputError(f"precision: there is no {requested!r}.{hint}") from None
    supported = support(name, device)
    if supported.level == "unsupported":
        raise ModelError(supported.reason)
    return PRECISIONS[name]


def _progress_logger(num_texts: int) -> Callable[[float], None]:
    """Return a function that logs the number of finished texts, at most every ten seconds."""
    last = time.monotonic()

    def log(done: float) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            _logger.info("predicted %d of %d texts", done, num_texts)

    return log


def _predictions(
    tasks: Sequence[Task],
    logits: Mapping[str, NDArray[np.float32]],
    split: TokenizedSplit,
    decisions: Mapping[str, DecodingThresholds],
) -> list[Prediction]:
    """Decode finite `logits` into the prediction of each example of a split, in its order."""
    decisions = decisions or {task.name: DecodingThresholds() for task in tasks}
    labels, _ = decode_tasks(tasks, logits, split, decisions)
    probabilities = class_probabilities(tasks, logits, split)
    predictions: list[Prediction] = [{} for _ in split.examples]
    for task in tasks:
        for e, (example, label) in enumerate(zip(split.examples, labels[task.name], strict=True)):
            if KINDS[task.kind].in_spans:
                spans = [
                    PredictedSpan(name, start, end, example.text[start:end]) for name, start, end in label
                ]
                predictions[e][task.name] = TaskPrediction(spans=spans)
            else:
                scores = probabilities[task.name][e].tolist() if task.name in probabilities else ()
                predictions[e][task.name] = TaskPrediction(
                    label, dict(zip(task.labels, scores, strict=False))
                )
    return predictions
