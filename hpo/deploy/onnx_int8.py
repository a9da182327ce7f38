"""The int8 form: an ONNX export with weights of one byte and products of integers, made by onnxruntime.

Activations get their range from each batch. Each output of a linear layer has a scale of its own: one scale
for a matrix is as fast, and ruins layers (`tests/benchmarks/README.md`). Norms, softmax and products of
attention stay in fp32.

Weights of linear layers have 7 bits (`reduce_range`): x86 processors without VNNI add pairs of products in 16
bits, which 8 bits overflow (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html).
Unsigned weights of 8 bits take 1.6 times as long. With MiniLM, the error of the logits relative to their
spread is 0.13, and 0.12 with 8 bits.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hpo.deploy.onnx_fp32 import LIBRARIES, quiet, require, write_onnx_metadata
from hpo.errors import ModelError, shorten
from hpo.inference.onnx_network import OnnxNetwork, load_onnx
from hpo.models.export import new_folder, read_metadata
from hpo.versions import installed_versions


def quantize(source: Path, directory: Path) -> Path:
    """Write the fp32 ONNX export in `source` as one in int8, in a folder of the same files.

    The folder appears at once or not at all. Raises ModelError if `source` is no such export or `directory`
    is not free.
    """
    require("onnx", "onnxruntime")
    network = load_onnx(source)[0]
    if network.settings.precision != "fp32":
        raise ModelError(f"{source} must be an ONNX export in fp32, but it is in int8 already.")
    with new_folder(directory) as folder:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("hpo.json"), dirs_exist_ok=True)
        settings = replace(
            network.settings,
            precision="int8",
            opset=_quantize_graph(folder / "model.onnx"),
            versions=installed_versions(*LIBRARIES),
            quantization={"static": False, "per_channel": True, "reduce_range": True},
        )
        OnnxNetwork(folder / "model.onnx", network.tasks, settings)  # raises if onnxruntime cannot run it
        write_onnx_metadata(folder, read_metadata(source), settings)
    return directory


def _quantize_graph(file: Path) -> int:
    """Quantise the embeddings, then the linear layers, in place. Return the version of ONNX's operators."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    graph = onnx.load(file)
    # onnxruntime's pre-processing would change nothing: the exporter folds constants and infers shapes.
    add_pre_process_metadata(graph)
    with tempfile.TemporaryDirectory(prefix="hpo-quantize-") as temporary, quiet():
        step = Path(temporary, "model.onnx")
        try:
            quantize_dynamic(graph, step, op_types_to_quantize=["Gather"])
            graph = onnx.load(step)
            add_pre_process_metadata(graph)
            quantize_dynamic(
                graph,
                file,
                op_types_to_quantize=["MatMul"],
                per_channel=True,
                reduce_range=True,
                weight_type=QuantType.QInt8,
            )
        except Exception as error:  # its kind depends on the graph
            raise ModelError(
                f"onnxruntime could not quantise the graph ({type(error).__name__}: "
                f"{shorten(str(error), 200)}). Use its ONNX export in fp32."
            ) from error
    return int(next(one.version for one in onnx.load(file).opset_import if not one.domain))
