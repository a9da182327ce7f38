"""A model that onnxruntime runs, in the place of a `MultitaskModel`.

The graph is fixed: what it computes in, and which layers are quantised, was decided when it was written. On a
CPU it has as many threads as PyTorch has, so that one setting (`torch.set_num_threads`) holds for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
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
_FATAL = 4  # onnxruntime's log severity: errors are raised, too, and need no second telling


@dataclass(frozen=True, kw_only=True)
class OnnxSettings:
    """The key `onnx` of the hpo.json of an ONNX export."""

    precision: str = "fp32"
    """Precision of the products of the layers: `int8` if some are quantised, else `fp32`."""
    opset: int
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries at the time of the export."""
    quantization: Mapping[str, Any] | None = None
    """See `hpo.deploy.quantize`; None: not quantised."""


def output_name(task: str) -> str:
    """The graph's output of a task: its logits, float32."""
    return f"logits_{task}"


class OnnxNetwork(nn.Module):
    """The graph in `file`; called as a `MultitaskModel`, it gives what that gives.

    It has no parameters, and no gradient passes it. `to` moves it to another device.

    Raises ModelError where onnxruntime is not installed, or `file` is no graph.
    """

    def __init__(self, file: Path, tasks: Sequence[Task], settings: OnnxSettings) -> None:
        super().__init__()
        self.file = file
        self.tasks = tuple(tasks)
        self.settings = settings
        self.register_buffer("_place", torch.empty(0), persistent=False)
        self._place: Tensor
        self._open()

    @property
    def device(self) -> torch.device:
        """The device of the graph."""
        return self._place.device

    @property
    def input_names(self) -> frozenset[str]:
        """The graph's own inputs, some or all of `INPUTS`."""
        return self._inputs

    @property
    def has_ranges_of_batch(self) -> bool:
        """Return True if activations become int8 with the range of each batch: logits depend on the batch."""
        how = self.settings.quantization
        return how is not None and not how["static"]

    def check_precision(self, precision: str | None) -> None:
        """Raise ModelError where another precision than the graph's is asked for."""
        if precision not in (None, self.settings.precision):
            raise ModelError(
                f"{self.file.parent} is an ONNX export in {self.settings.precision}: its precision must be "
                f"that, but got {precision!r}. Leave it out, or use another of the exports."
            )

    def forward(
        self, input_ids_BL: Tensor, attention_mask_BL: Tensor | None, type_ids_BL: Tensor | None = None
    ) -> dict[str, Tensor]:
        """See `MultitaskModel.forward`. Raises MemoryError or RunError where onnxruntime fails."""
        if self._threads != torch.get_num_threads():
            self._open()
        if type_ids_BL is None:
            type_ids_BL = torch.zeros_like(input_ids_BL)
        if attention_mask_BL is None:
            attention_mask_BL = torch.ones_like(input_ids_BL)
        given = zip(INPUTS, (input_ids_BL, attention_mask_BL, type_ids_BL), strict=True)
        feeds = {name: _as_int64(tensor) for name, tensor in given if name in self._inputs}
        try:
            outputs = self._session.run([output_name(task.name) for task in self.tasks], feeds)
        except Exception as error:  # onnxruntime's classes have Exception alone as their base
            if "allocate" in str(error) or "bad_alloc" in str(error):
                raise MemoryError(str(error)) from error
            raise RunError(f"onnxruntime could not run {self.file}: {shorten(str(error), 200)}") from error
        tensors = (torch.from_numpy(output).to(input_ids_BL.device) for output in outputs)
        return {task.name: logits for task, logits in zip(self.tasks, tensors, strict=True)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnnxNetwork:
        before = self.device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._place.dtype is not torch.float32:
            self._place = self._place.float()
            raise ModelError(f"{self.file.parent} is an ONNX export, whose weights cannot be cast.")
        if self.device != before:
            self._open()
        return self

    def _open(self) -> None:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL
        options.intra_op_num_threads = self._threads = torch.get_num_threads()
        providers: list[Any] = ["CPUExecutionProvider"]
        if self.device.type == "cuda":
            if not has_cuda_provider():
                available = ", ".join(onnxruntime.get_available_providers())
                raise ModelError(
                    "an ONNX export on CUDA needs onnxruntime's CUDAExecutionProvider, but this onnxruntime "
                    f"{onnxruntime.__version__} has {available}. Use device cpu, or install "
                    "onnxruntime-gpu in its place."
                )
            of_cuda = {"device_id": self.device.index or 0, "use_tf32": "0"}
            providers.insert(0, ("CUDAExecutionProvider", of_cuda))
        try:
            self._session = onnxruntime.InferenceSession(self.file, options, providers=providers)
        except Exception as error:  # as in `forward`
            raise ModelError(not_intact(self.file.parent, error)) from error
        if self.device.type == "cuda" and self._session.get_providers()[0] != "CUDAExecutionProvider":
            raise ModelError(
                "onnxruntime could not start its CUDAExecutionProvider: its build must fit the CUDA and "
                "cuDNN here. Use device cpu."
            )
        self._inputs = frozenset(one.name for one in self._session.get_inputs())


def load_onnx(
    directory: Path, *, trust_remote_code: bool = False
) -> tuple[OnnxNetwork, PreTrainedTokenizerBase, ExportSettings]:
    """Return the network of an ONNX export on the CPU, its tokenizer and settings.

    Raises ModelError where the folder is no intact one, or onnxruntime is not installed.
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
    return network.eval(), load_tokenizer(str(directory), trust_remote_code=trust_remote_code), settings


def missing_packages() -> str:
    """Return why this machine cannot make an ONNX model, or "" if it can."""
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    return f"needs the package {' and '.join(missing)}. {install_hint('onnx')}" if missing else ""


def has_cuda_provider() -> bool:
    """Return whether the installed onnxruntime was built for CUDA. Raises ModelError if there is none."""
    return "CUDAExecutionProvider" in import_onnxruntime().get_available_providers()


def import_onnxruntime() -> Any:
    """Import the package. Raises ModelError if it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ModelError(
            f"an ONNX export needs onnxruntime, which could not be imported ({shorten(str(error), 100)}). "
            f"{install_hint('onnx')}"
        ) from error
    return onnxruntime


def _as_int64(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.ascontiguousarray(tensor.detach().cpu().numpy(), dtype=np.int64)
