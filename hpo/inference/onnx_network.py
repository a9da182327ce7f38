"""A model that onnxruntime runs on a CPU, called like a `MultitaskModel`.

The graph is fixed: its precision was decided when it was written. It uses PyTorch's number of threads, so one
setting (`torch.set_num_threads`) holds for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hpo.errors import ModelError, RunError, shorten
from hpo.models.encoder import load_tokenizer
from hpo.models.export import ExportSettings, check_files, not_intact, read_metadata, read_settings
from hpo.tasks.kind import Task
from hpo.versions import install_hint

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""The graph's inputs, int64 [batch, tokens]. Only encoders with segments have the last one."""

ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
"""Packages of the extra `onnx`."""
_FILES = ("model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json")
_FATAL = 4  # onnxruntime's log severity; errors are raised as well


@dataclass(frozen=True, kw_only=True)
class OnnxSettings:
    """The key `onnx` of the hpo.json of an ONNX export."""

    precision: str = "fp32"
    """Precision of linear layers: `fp32` or `int8`."""
    opset: int
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries at the time of the export."""
    quantization: Mapping[str, Any] | None = None
    """Settings of the quantisation. None: not quantised."""


def output_name(task: str) -> str:
    """Return the name of the graph's output with a task's logits."""
    return f"logits_{task}"


class OnnxNetwork(nn.Module):
    """The graph in `file`. It has no parameters, and no gradient passes it.

    Raises ModelError if onnxruntime is not installed, or `file` is no graph.
    """

    device = torch.device("cpu")

    def __init__(self, file: Path, tasks: Sequence[Task], settings: OnnxSettings) -> None:
        super().__init__()
        self.file = file
        self.tasks = tuple(tasks)
        self.settings = settings
        self._open()

    def check_precision(self, precision: str | None) -> None:
        """Raise ModelError for a precision that is not the graph's."""
        if precision not in (None, self.settings.precision):
            raise ModelError(
                f"{self.file.parent} is an ONNX export in {self.settings.precision}: its precision must be "
                f"that, but got {precision!r}. Leave it out, or use another of the exports."
            )

    def forward(
        self, input_ids_BL: Tensor, attention_mask_BL: Tensor | None, type_ids_BL: Tensor | None = None
    ) -> dict[str, Tensor]:
        """See `MultitaskModel.forward`. Raises MemoryError or RunError if onnxruntime fails."""
        if self._threads != torch.get_num_threads():
            self._open()
        if type_ids_BL is None:
            type_ids_BL = torch.zeros_like(input_ids_BL)
        if attention_mask_BL is None:
            attention_mask_BL = torch.ones_like(input_ids_BL)
        inputs = zip(INPUTS, (input_ids_BL, attention_mask_BL, type_ids_BL), strict=True)
        feeds = {name: tensor.long().contiguous().numpy() for name, tensor in inputs if name in self._inputs}
        names = [task.name for task in self.tasks]
        try:
            outputs = self._session.run([output_name(name) for name in names], feeds)
        except Exception as error:  # onnxruntime's errors have no base class of their own
            if "allocate" in str(error) or "bad_alloc" in str(error):
                raise MemoryError(str(error)) from error
            raise RunError(f"onnxruntime could not run {self.file}: {shorten(str(error), 200)}") from error
        return {name: torch.from_numpy(output) for name, output in zip(names, outputs, strict=True)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnnxNetwork:  # noqa: ARG002
        """Refuse `half`, `cuda` and the like, which would change nothing."""
        moved = fn(torch.empty(0))
        if (moved.device, moved.dtype) != (self.device, torch.float32):
            raise ModelError(
                f"{self.file.parent} is an ONNX export: it cannot be cast, and runs on the CPU. "
                "Use device cpu."
            )
        return self

    def _open(self) -> None:
        onnxruntime = _import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL
        options.intra_op_num_threads = self._threads = torch.get_num_threads()
        try:
            self._session = onnxruntime.InferenceSession(
                self.file, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # as in `forward`
            raise ModelError(not_intact(self.file.parent, error)) from error
        self._inputs = {one.name for one in self._session.get_inputs()}


def load_onnx(
    directory: Path, *, trust_remote_code: bool = False
) -> tuple[OnnxNetwork, PreTrainedTokenizerBase, ExportSettings]:
    """Return the network of an ONNX export, its tokenizer and settings.

    Raises ModelError if the folder is not intact, or onnxruntime is not installed.
    """
    content = read_metadata(directory)
    if content["runtime"] != "onnx":
        raise ModelError(f"{directory} must be an ONNX export, but it is one of {content['runtime']}.")
    check_files(directory, _FILES, content)
    tasks, settings = read_settings(directory, content)
    try:
        onnx_settings = OnnxSettings(**content["onnx"])
    except (LookupError, TypeError) as error:
        raise ModelError(not_intact(directory, error)) from error
    network = OnnxNetwork(directory / "model.onnx", tasks, onnx_settings)
    tokenizer = load_tokenizer(str(directory), trust_remote_code=trust_remote_code, saved_class=True)
    return network.eval(), tokenizer, settings


def missing_packages() -> str:
    """Return why this machine cannot make an ONNX model, or "" if it can."""
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    return f"needs the package {' and '.join(missing)}. {install_hint('onnx')}" if missing else ""


def _import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ModelError(
            f"an ONNX export needs onnxruntime, which could not be imported ({shorten(str(error), 100)}). "
            f"{install_hint('onnx')}"
        ) from error
    return onnxruntime
