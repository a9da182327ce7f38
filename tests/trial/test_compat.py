"""The verdict on a measurement, and its cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import CPU, CompatCache, amp_of, parts_of, tiny_executor, tiny_model
from support.tiny_loop import accumulate
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import hpo.models.attention
import hpo.models.encoder
from hpo.config.sections import CompatConfig
from hpo.device import DeviceInfo
from hpo.precision.amp import prepare_model
from hpo.precision.table import PRECISIONS
from hpo.trial.compat import cache_key, check_compatibility, judge, measure_parts
from hpo.trial.executor import Executor
from hpo.trial.measure import Measurement

BOUNDS = CompatConfig()


def key_of(executor: Executor, device: DeviceInfo = CPU, **params: Any) -> str:
    return cache_key(replace(parts_of(executor, fp_precision="fp32", **params), device=device))


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_fault_on_padding_is_found(tmp_path: Path, name: str) -> None:
    parts = parts_of(tiny_executor(tmp_path), fp_precision=name)
    shortest = int(parts.data.train.lengths_W.min())

    def break_short(_encoder: Any, _args: Any, inputs: dict[str, Tensor], output: Any) -> Any:
        """Break short rows, as if everything were masked."""
        if torch.is_autocast_enabled("cpu"):
            is_short_B = inputs["attention_mask"].sum(dim=1) <= shortest
            hidden = output.last_hidden_state
            output.last_hidden_state = hidden.masked_fill(is_short_B[:, None, None], torch.nan)
        return output

    parts.model.encoder.register_forward_hook(break_short, with_kwargs=True)
    found = judge(measure_parts(parts), BOUNDS)
    assert found.verdict == ("incompatible" if name == "fp16" else "ok")
    assert not found.reasons or "logits not finite under fp16" in found.reasons[0]


def test_cache_key_has_every_condition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with dropout has a kernel of its own; its rate does not matter: the check drops nothing."""
    executor = tiny_executor(tmp_path)
    names = ("attention_dropout", "attention", "pooling", "max_length", "label_smoothing")
    settings = [{name: value} for name, value in zip(names, (0.1, "eager", "max", 32, 0.1), strict=True)]
    keys = [key_of(executor, **changed) for changed in ({}, {"attention_dropout": 0.0}, *settings)]
    assert key_of(executor, attention_dropout=0.2) == keys[2]
    assert key_of(executor, learning_rate=1e-5) == keys[0]
    assert key_of(executor, replace(CPU, host="elsewhere", total_memory_bytes=1)) == keys[0]
    devices: list[dict[str, Any]] = [
        {"name": "another CPU"},
        {"cpu_features": frozenset({"amx_bf16"})},
        {"type": "cuda", "compute_capability": (9, 0)},
        {"cuda_version": "13.0"},
        {"rocm_version": "7.1"},
        {"type": "cuda", "gcn_arch": "gfx90a"},
        {"type": "cuda", "gcn_arch": "gfx942"},
    ]
    keys += [key_of(executor, replace(CPU, **changed)) for changed in devices]
    for name, setting in (("ONEDNN_MAX_CPU_ISA", "AVX2"), ("NVIDIA_TF32_OVERRIDE", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, setting)
            keys.append(key_of(executor))
    for name in ("MEASUREMENT_VERSION", "torch.__version__", "transformers.__version__"):
        with monkeypatch.context() as patch:
            patch.setattr(f"hpo.trial.compat.{name}", "9.9")
            keys.append(key_of(executor))
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        for value in (False, (False, False), True):  # the last is the default
            setattr(torch.backends.cuda.matmul, name, value)
            keys += [] if value is True else [key_of(executor)]
    assert len(set(keys)) == len(keys)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as FlashAttention's: in fp16 and bf16 alone, and zero behind the end of a text."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        output, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        return output if mask is None else output * mask[:, 0, 0, :, None, None], None

    name = "half_precision_alone"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    monkeypatch.setitem(hpo.models.encoder.ATTENTION_IMPLEMENTATIONS, "flash", name)
    monkeypatch.setattr(hpo.models.attention, "FLASH", name)


@pytest.mark.usefixtures("flash")
def test_flash_attention_is_compared_with_sdpa(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, training={"max_steps": 1, "max_length": 64, "attention": "flash"})
    found = check_compatibility(parts_of(executor, fp_precision="bf16"), None)
    assert (found.verdict, found.reasons) == ("ok", ())
    assert found.measurement.gradient_cosine
    refused = executor.run({"fp_precision": "fp32"}, None, "")
    assert (refused.outcome, "only support fp16 and bf16" in refused.reason) == ("incompatible", True)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize(("broken", "verdict"), [("fp32 bf16", "invalid"), ("bf16", "incompatible")])
def test_compiler_is_at_fault_if_fp32_breaks(tmp_path: Path, name: str, broken: str, verdict: str) -> None:
    def compile_model(model: Any, *_: Any) -> None:
        def refuse(*_: Any) -> None:
            if ("bf16" if torch.is_autocast_enabled("cpu") else "fp32") in broken:
                raise RuntimeError("no C++ compiler")

        model.register_forward_pre_hook(refuse)

    executor = tiny_executor(tmp_path, training={"max_steps": 1, "compile": "default"})
    executor.loader.apply_compile = compile_model
    found = judge(measure_parts(parts_of(executor, fp_precision=name)), BOUNDS)
    assert found.verdict == (verdict if name in broken else "ok")
    others = [reason for reason in found.reasons if "is unverified" not in reason]
    assert bool(others) == (name in broken)


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-true"])
def test_repeat_counts_only_if_fp32_is_finite(name: str) -> None:
    """Otherwise the trial would end by the limit of repeats, though the same trial in fp32 would go on."""
    model = prepare_model(tiny_model(), PRECISIONS[name])
    model.register_forward_hook(lambda _, __, logits: {task: one * torch.nan for task, one in logits.items()})
    amp = amp_of(name, fallback_to_fp32=True)
    assert not accumulate(model, amp).isfinite()
    assert amp.step_fallbacks == 0


def test_only_whole_measurements_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, cache = tiny_executor(tmp_path), CompatCache()
    alone = Measurement("fp32", reference_fits=False)
    with monkeypatch.context() as patch:
        patch.setattr("hpo.trial.compat.measure", lambda *_: alone)
        assert check_compatibility(parts_of(executor, fp_precision="fp32"), cache).measurement == alone
    trials = [parts_of(executor, fp_precision="fp32") for _ in range(2)]
    first, second = (check_compatibility(parts, cache) for parts in trials)
    assert (first.verdict, first.cached, second.cached) == ("ok", False, True)
    assert second.measurement == first.measurement
    assert len(cache.stored) == 1


@pytest.mark.parametrize(
    ("error", "cosine", "verdict"),
    [
        (0.01, 0.999, "ok"),
        (BOUNDS.degraded_logits_relative_error * 1.01, 0.999, "degraded"),
        (BOUNDS.incompatible_logits_relative_error * 1.01, 0.999, "incompatible"),
        (0.01, BOUNDS.degraded_gradient_cosine - 0.001, "degraded"),
        (0.01, BOUNDS.incompatible_gradient_cosine - 0.001, "incompatible"),
    ],
)
def test_bounds_decide_the_verdict(error: float, cosine: float, verdict: str) -> None:
    measurement = Measurement("bf16", logits_relative_error={"topic": error}, gradient_cosine=cosine)
    found = judge(measurement, BOUNDS)
    assert found.verdict == verdict
    assert bool(found.reasons) == (verdict != "ok")
