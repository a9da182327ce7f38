"""The fp32 ONNX form: a graph that onnxruntime runs without PyTorch.

`torch.onnx` writes the graph: it comes with PyTorch and knows its operators. `optimum-onnx` lags behind.
"""

import copy
import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpo.errors import ModelError, shorten
from hpo.inference.model import TrainedModel
from hpo.inference.onnx_network import INPUTS, OnnxNetwork, OnnxSettings, output_name
from hpo.models.export import EXPORT_FORMATS, export_metadata, new_folder, write_metadata
from hpo.models.multitask import MultitaskModel
from hpo.versions import install_hint, installed_versions

LARGEST_BYTES = 2**31 - 2**20
"""Limit of the weights in one file: protobuf's limit, less room for the graph."""
LARGEST_DIFFERENCE = 1e-4
"""Largest difference between logits of the graph and of PyTorch, relative to logits above 1."""
LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime")
"""Packages to write and run graphs."""
_CHATTY = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


def export_onnx(model: TrainedModel, directory: Path) -> Path:
    """Write a folder for `hpo.load`; onnxruntime and tokenizers suffice to use it.

        model.onnx               input_ids, attention_mask [, token_type_ids] -> logits_<task> of each task
        tokenizer.json ...       the tokenizer, and config.json of the encoder
        hpo.json                 tasks, `ExportSettings`, and under `onnx` the `OnnxSettings`

    The graph takes any number of windows and tokens. The folder appears at once or not at all.

    Raises ModelError if `directory` is not free, the weights are not fp32, the export fails, or the graph
    computes other logits than the model.
    """
    network = _plain_copy(model)
    require("onnx", "onnxscript")
    batches = _batches(network, min(model.settings.windowing.max_length, 512))
    with new_folder(directory) as folder:
        proto = _graph(network, batches[0])
        (folder / "model.onnx").write_bytes(proto.SerializeToString())
        settings = OnnxSettings(opset=proto.opset_import[0].version, versions=installed_versions(*LIBRARIES))
        _check_logits(network, OnnxNetwork(folder / "model.onnx", model.tasks, settings), batches)
        model.tokenizer.save_pretrained(folder)
        network.encoder.config.save_pretrained(folder)
        write_onnx_metadata(folder, export_metadata(network, model.settings), settings)
    return directory


def write_onnx_metadata(folder: Path, content: dict[str, Any], onnx_settings: OnnxSettings) -> None:
    """Write hpo.json. `content` holds its entries for every runtime."""
    head = {"format": EXPORT_FORMATS["onnx"], "runtime": "onnx"}
    write_metadata(folder, {**head, **content, "onnx": asdict(onnx_settings)})


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings of exporters, for example of a missing torchvision, from the user's terminal."""
    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    # onnxruntime warns on the root logger, which would get a printing handler if it has none.
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    root.addFilter(_is_error)
    with warnings.catch_warnings(action="ignore"):
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            root.removeFilter(_is_error)
            root.removeHandler(handler)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class _Positional(nn.Module):
    """The network with its logits in the order of its tasks: graphs have no dictionaries."""

    def __init__(self, network: MultitaskModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.network(*inputs).values())


def _plain_copy(model: TrainedModel) -> MultitaskModel:
    """Copy the network to the CPU in evaluation mode. Raises ModelError if its weights are not fp32."""
    network = model.network
    if not isinstance(network, MultitaskModel):
        raise ModelError("an ONNX export is made of a PyTorch export, but this model is ONNX already.")
    if {one.dtype for one in network.parameters()} != {torch.float32} or model.precision == "fp8":
        raise ModelError(
            f"a model is exported to ONNX in fp32, but this one is in {model.precision}. Load it with "
            'precision="fp32".'
        )
    attention = getattr(network.encoder.config, "_attn_implementation", None) or ""
    if attention.startswith("flash"):
        raise ModelError(f'ONNX has no {attention}. Load the model with attention="sdpa" or "eager".')
    num_bytes = sum(weight.numel() * 4 for weight in network.parameters())
    if num_bytes > LARGEST_BYTES:
        raise ModelError(
            "an ONNX file holds at most 2 GB (protobuf's limit), but the model has "
            f"{num_bytes / 1e9:.1f} GB of weights in fp32. Use its PyTorch export."
        )
    return copy.deepcopy(network).cpu().eval()


def _batches(network: MultitaskModel, longest: int) -> list[tuple[Tensor, ...]]:
    """Make batches to trace and to check: three windows (the last has one token), and one window alone."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = getattr(network.encoder.config, "vocab_size", 2)
    batches = []
    for lengths in ((longest, longest // 2 + 1, 1), (longest // 3 + 1,)):
        mask_BL = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids_BL = torch.randint(vocab_size, mask_BL.shape, generator=generator)
        types_BL = torch.randint(2, mask_BL.shape, generator=generator)
        batches.append((ids_BL, mask_BL, types_BL)[: 3 if network.passes_type_ids else 2])
    return batches


def _graph(network: MultitaskModel, batch: tuple[Tensor, ...]) -> Any:
    """Return the `onnx.ModelProto`. Raises ModelError if the exporter fails."""
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        # torch.export prints the whole graph where it fails.
        with quiet(), redirect_stderr(StringIO()), torch.no_grad():
            program = torch.onnx.export(
                _Positional(network).eval(),
                batch,
                input_names=INPUTS[: len(batch)],
                output_names=[output_name(task.name) for task in network.tasks],
                dynamic_shapes=((free,) * len(batch),),
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # from the exporter, onnxscript or the encoder's own code
        raise ModelError(
            f"{type(network.encoder).__name__} cannot be exported to ONNX ({type(error).__name__}: "
            f"{shorten(str(error), 200)}). Use its PyTorch export."
        ) from error
    proto: Any = program.model_proto  # type: ignore[union-attr]
    _remove_paths(proto)
    return proto


def _remove_paths(proto: Any) -> None:
    graph = proto.graph
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for one in (*graph.value_info, *graph.input, *graph.output, *graph.initializer, graph, proto):
        del one.metadata_props[:]


def _check_logits(network: MultitaskModel, graph: OnnxNetwork, batches: list[tuple[Tensor, ...]]) -> None:
    """Raise ModelError if the graph's logits of real tokens differ from PyTorch's."""
    for batch in batches:
        with torch.no_grad():
            expected, computed = network(*batch), graph(*batch)
        is_real_BL = batch[1].bool()
        for task in network.tasks:
            theirs, ours = expected[task.name], computed[task.name]
            if task.level == "token":
                theirs, ours = theirs[is_real_BL], ours[is_real_BL]
            difference = float((theirs - ours).abs().max() / theirs.abs().max().clamp(min=1))
            if not difference <= LARGEST_DIFFERENCE:
                raise ModelError(
                    f"the ONNX graph of {type(network.encoder).__name__} must give PyTorch's logits, but "
                    f"those of `{task.name}` differ by {difference:.1g}. Use its PyTorch export."
                )


def require(*packages: str) -> None:
    """Raise ModelError if a package of the extra `onnx` is missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ModelError(
                f"writing ONNX needs {package}, which could not be imported. {install_hint('onnx')}"
            ) from error
