"""Export of a trained model to an ONNX graph in fp32, which onnxruntime runs without PyTorch.

`torch.onnx` writes the graph: it comes with PyTorch and follows its operators, which `optimum-onnx` lags
behind.
"""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
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
"""Between the logits of the graph and of PyTorch, of logits up to 1, or relative to larger ones."""

LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime")
"""Packages to write and run graphs."""
_CHATTY = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


def export_onnx(model: TrainedModel, directory: Path) -> Path:
    """Write a folder that `hpo.load` loads, and that onnxruntime and tokenizers suffice to use.

        model.onnx               input_ids, attention_mask [, token_type_ids] -> logits_<task> of each task
        tokenizer.json ...       the tokenizer, and config.json of the encoder
        hpo.json                 tasks, `ExportSettings`, and under `onnx` the `OnnxSettings`

    Any number of windows and tokens may be given to the graph. The folder appears at once or not at all.

    Raises ModelError where `directory` holds anything but an earlier export, the model's weights are not in
    fp32, it cannot be exported, or the graph gives other logits than the model.
    """
    network = _plain(model)
    require("onnx", "onnxscript")
    windowing = model.settings.windowing
    batches = _batches(network, min(windowing.max_length, 512))
    with new_folder(directory) as folder:
        proto = _graph(network, batches[0])
        (folder / "model.onnx").write_bytes(proto.SerializeToString())
        settings = OnnxSettings(opset=proto.opset_import[0].version, versions=installed_versions(*LIBRARIES))
        _check_logits(network, OnnxNetwork(folder / "model.onnx", model.tasks, settings), batches)
        model.tokenizer.save_pretrained(folder)
        network.encoder.config.save_pretrained(folder)
        content = export_metadata(network, model.settings)
        write_onnx_metadata(folder, content, settings)
    return directory


def write_onnx_metadata(folder: Path, content: dict[str, Any], onnx_settings: OnnxSettings) -> None:
    """Write hpo.json. `content` holds its entries for every runtime."""
    head = {"format": EXPORT_FORMATS["onnx"], "runtime": "onnx"}
    write_metadata(folder, {**head, **content, "onnx": asdict(onnx_settings)})


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings of exporters, for example of a missing torchvision, from the user's terminal."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


class _Positional(nn.Module):
    """The network with its logits in the order of its tasks: graphs have no dictionaries."""

    def __init__(self, network: MultitaskModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.network(*inputs).values())


def _plain(model: TrainedModel) -> MultitaskModel:
    """Copy the model's network to the CPU, in fp32 and in evaluation mode."""
    network = model.network
    if not isinstance(network, MultitaskModel):
        raise ModelError("an ONNX export is made of a PyTorch export, but this model is ONNX already.")
    dtypes = {
        str(one.dtype).removeprefix("torch.") for one in network.parameters() if one.is_floating_point()
    }
    if dtypes != {"float32"} or model.precision == "fp8":
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
    """Batches to trace and to check with: three windows, one of one token, and one window alone."""
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
    """The `onnx.ModelProto`. Raises ModelError where the exporter fails."""
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                _Positional(network).eval(),
                batch,
                input_names=INPUTS[: len(batch)],
                output_names=[output_name(task.name) for task in network.tasks],
                dynamic_shapes=((free,) * len(batch),),
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # of many kinds: what the exporter, onnxscript or the encoder's own code raise
        raise ModelError(
            f"{type(network.encoder).__name__} cannot be exported to ONNX ({type(error).__name__}: "
            f"{shorten(str(error), 200)}). Use its PyTorch export."
        ) from error
    proto: Any = program.model_proto  # type: ignore[union-attr]
    _products_of_matrices(proto.graph)
    _without_paths(proto)
    return proto


def _products_of_matrices(graph: Any) -> None:
    """Replace each Gemm (heads of pooled texts) by a MatMul and an Add, as in other layers.

    Quantisation does so too, with other names.
    """
    from onnx import helper, numpy_helper

    weights = {one.name: one for one in graph.initializer}
    nodes = []
    for node in graph.node:
        options = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        is_plain = options.pop("transB", 0) == 1 and options.pop("transA", 0) == 0
        is_plain = is_plain and all(scale == 1 for scale in options.values())
        if node.op_type != "Gemm" or not is_plain or node.input[1] not in weights:
            nodes.append(node)
            continue
        inputs, weight, *bias = node.input
        transposed = numpy_helper.to_array(weights[weight]).T.copy()
        product = f"{node.output[0]}_product" if bias else node.output[0]
        graph.initializer.append(numpy_helper.from_array(transposed, f"{weight}_transposed"))
        nodes.append(helper.make_node("MatMul", [inputs, f"{weight}_transposed"], [product], node.name))
        if bias:
            nodes.append(helper.make_node("Add", [product, *bias], node.output, f"{node.name}_bias"))
    used = {name for node in nodes for name in node.input}
    initializers = [one for one in graph.initializer if one.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(initializers)


def _without_paths(proto: Any) -> None:
    graph = proto.graph
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for one in (*graph.value_info, *graph.input, *graph.output, *graph.initializer, graph, proto):
        del one.metadata_props[:]


def _check_logits(network: MultitaskModel, graph: OnnxNetwork, batches: list[tuple[Tensor, ...]]) -> None:
    """Raise ModelError where the graph gives other logits than PyTorch, at real tokens."""
    for batch in batches:
        with torch.no_grad():
            expected, computed = network(*batch), graph(*batch)
        is_real_BL = batch[1].bool()
        for task in network.tasks:
            wanted, got = expected[task.name], computed[task.name]
            if task.level == "token":
                wanted, got = wanted[is_real_BL], got[is_real_BL]
            difference = float((wanted - got).abs().max() / wanted.abs().max().clamp(min=1))
            if not difference <= LARGEST_DIFFERENCE:
                raise ModelError(
                    f"the ONNX graph of {type(network.encoder).__name__} must give PyTorch's logits, but "
                    f"those of `{task.name}` differ by {difference:.1g}. Use its PyTorch export."
                )


def require(*packages: str) -> None:
    """Raise ModelError where a package of the extra `onnx` is missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ModelError(
                f"writing ONNX needs {package}, which could not be imported. {install_hint('onnx')}"
            ) from error
