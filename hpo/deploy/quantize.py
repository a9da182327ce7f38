"""An ONNX export whose layers compute in int8: weights of one byte, products of integers.

Activations have the range of each batch (dynamic), or ranges of texts of the training split (static). Each
output of a linear layer has a scale of its own: one scale for a matrix is as fast, and ruins layers
(`tests/benchmarks/README.md`). Norms, softmax and products of attention stay in fp32.

Weights of linear layers have 7 bits (`reduce_range`): x86 processors without VNNI add pairs of products in 16
bits, which 8 bits overflow (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html).
Unsigned weights of 8 bits take 1.6 times as long. With MiniLM, the error of the logits relative to their
spread is 0.13, and 0.12 with 8 bits.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hpo.data.batches import collate, evaluation_batches
from hpo.data.tokenization import tokenize_chunks
from hpo.deploy.artifacts import Quantization
from hpo.deploy.onnx_export import LIBRARIES, quiet, require, write_onnx_metadata
from hpo.errors import ModelError, shorten
from hpo.inference.onnx_network import INPUTS, OnnxNetwork, load_onnx
from hpo.models.export import check_export_folder, new_folder, not_intact, read_metadata
from hpo.tasks.example import Example
from hpo.tasks.tokenized_split import Windowing
from hpo.versions import installed_versions

CALIBRATION_TEXTS = 256
"""Taken of those given, evenly: the ranges of more texts differ little."""

CALIBRATION_WINDOWS = 512
"""At most, of texts that have many."""

_CALIBRATION_TOKENS = 1024  # of a batch, padding included


def quantize(source: Path, directory: Path, mode: Quantization, calibration: Sequence[Example] = ()) -> Path:
    """Write the ONNX export in `source`, which is in fp32, as one in int8; the folder has the same form.

    `calibration` are texts of the training split, for the static mode: `CALIBRATION_TEXTS` of them are used.
    hpo.json tells under `onnx` and `quantization` the mode and the number of texts. The folder appears at
    once or not at all.

    Raises ModelError where `source` is no such export, `directory` is not free, or the static mode has no
    texts.
    """
    check_export_folder(directory)
    require("onnx", "onnxruntime")
    content = read_metadata(source)
    network, tokenizer, settings = load_onnx(source)
    if network.settings.quantization is not None:
        raise ModelError(f"{source} must be an ONNX export in fp32, but it is quantised already.")
    is_static = mode == "static"
    if is_static and not calibration:
        raise ModelError("static quantisation needs texts of the training split to calibrate, but got none.")
    texts = _evenly(calibration, CALIBRATION_TEXTS) if is_static else ()
    batches = _batches(network, tokenizer, settings.windowing, texts) if is_static else None
    with new_folder(directory) as folder:
        _write_graph(_read_graph(source), folder / "model.onnx", batches)
        quantization = {
            "static": is_static,
            "per_channel": True,
            "reduce_range": True,
            "num_calibration_texts": len(texts),
        }
        opsets = _read_graph(folder).opset_import
        onnx_settings = replace(
            network.settings,
            precision="int8",
            opset=next(one.version for one in opsets if not one.domain),
            versions=installed_versions(*LIBRARIES),
            quantization=quantization,
        )
        OnnxNetwork(folder / "model.onnx", network.tasks, onnx_settings)  # which reads and checks it
        for file in source.iterdir():
            if file.name not in ("model.onnx", "hpo.json") and file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
        of_any = {key: value for key, value in content.items() if key not in ("format", "runtime", "onnx")}
        of_any["tasks"] = network.tasks
        write_onnx_metadata(folder, of_any, onnx_settings)
    return directory


def _write_graph(graph: Any, file: Path, batches: Sequence[Any] | None) -> None:
    """Quantise the embeddings, then the linear layers: static with the ranges of `batches`, None: dynamic."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    # onnxruntime's pre-processing would change nothing: the exporter has folded constants and told shapes.
    add_pre_process_metadata(graph)
    embeddings, linears = (_with_weights(graph, operator) for operator in ("Gather", "MatMul"))
    of_linears = {
        "op_types_to_quantize": ["MatMul"],
        "nodes_to_quantize": linears,
        "per_channel": True,
        "reduce_range": True,
        "weight_type": QuantType.QInt8,
    }
    with tempfile.TemporaryDirectory(prefix="hpo-quantize-") as temporary, _quiet():
        step = Path(temporary, "model.onnx")
        try:
            quantize_dynamic(graph, step, op_types_to_quantize=["Gather"], nodes_to_quantize=embeddings)
            graph = onnx.load(step)
            add_pre_process_metadata(graph)
            if batches is None:
                quantize_dynamic(graph, step, **of_linears)
            else:
                quantize_static(
                    _inputs_apart(graph, linears),
                    step,
                    _Reader(batches),
                    activation_type=QuantType.QUInt8,
                    extra_options={
                        "MatMulConstBOnly": True,
                        "OpTypesToExcludeOutputQuantization": ["MatMul"],
                        "CalibMaxIntermediateOutputs": 8,  # batches whose ranges are held at a time
                    },
                    **of_linears,
                )
        except Exception as error:  # of many kinds, by the graph
            raise ModelError(
                f"onnxruntime could not quantise the graph ({type(error).__name__}: "
                f"{shorten(str(error), 200)}). Use its ONNX export in fp32."
            ) from error
        file.write_bytes(step.read_bytes())


def _with_weights(graph: Any, operator: str) -> list[str]:
    """The names of the nodes of an operator that take a matrix of weights."""
    weights = {one.name for one in graph.graph.initializer if one.data_type == 1 and len(one.dims) == 2}
    return [node.name for node in graph.graph.node if node.op_type == operator and weights & {*node.input}]


def _inputs_apart(graph: Any, nodes: Collection[str]) -> Any:
    """Give the inputs of these nodes names of their own, by an Identity that onnxruntime drops when it runs.

    A tensor's range would be put upon all that take it, as the residual sum after a layer.
    """
    from onnx import helper

    given: dict[str, str] = {}
    apart = []
    for node in graph.graph.node:
        if node.name in nodes:
            name = node.input[0]
            if name not in given:
                given[name] = f"{name}_of_layers"
                apart.append(helper.make_node("Identity", [name], [given[name]], given[name]))
            node.input[0] = given[name]
        apart.append(node)
    del graph.graph.node[:]
    graph.graph.node.extend(apart)
    return graph


def _read_graph(source: Path) -> Any:
    require("onnx")
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(source / "model.onnx")
    except (OSError, DecodeError) as error:
        raise ModelError(not_intact(source, error)) from error


def _batches(
    network: OnnxNetwork, tokenizer: PreTrainedTokenizerBase, windowing: Windowing, texts: Sequence[Example]
) -> list[dict[str, Any]]:
    """The graph's inputs of the texts' windows, cut as the model cuts them."""
    batches = []
    for split in tokenize_chunks(texts, (), tokenizer, windowing):
        lengths_W = split.lengths_W
        windows = np.array(_evenly(range(len(lengths_W)), CALIBRATION_WINDOWS))
        for rows in evaluation_batches(lengths_W[windows], _CALIBRATION_TOKENS):
            batch = collate(split, windows[rows], (), tokenizer.pad_token_id or 0)
            types_BL = batch.type_ids_BL
            if types_BL is None:
                types_BL = batch.input_ids_BL.new_zeros(batch.input_ids_BL.shape)
            given = zip(INPUTS, (batch.input_ids_BL, batch.attention_mask_BL, types_BL), strict=True)
            batches.append({name: one.numpy() for name, one in given if name in network.input_names})
    return batches


class _Reader:
    """The batches as onnxruntime's calibration reads them."""

    def __init__(self, batches: Sequence[dict[str, Any]]) -> None:
        self._batches = iter(batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._batches

    def get_next(self) -> dict[str, Any] | None:
        return next(self._batches, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """As `quiet`; onnxruntime warns on the root logger, which it gives a handler where it has none."""
    root, handler = logging.getLogger(), logging.NullHandler()

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    root.addHandler(handler)
    root.addFilter(is_error)
    try:
        with quiet():
            yield
    finally:
        root.removeFilter(is_error)
        root.removeHandler(handler)


def _evenly(values: Sequence[Any], most: int) -> Sequence[Any]:
    if len(values) <= most:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, most).astype(int).tolist()]
