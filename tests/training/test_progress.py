"""The meter's rates, percentiles and bounded size; floating-point operations of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import CPU
from support.tiny_encoders import BERT, make_model, scalar_loss

from hpo.device import probe_device
from hpo.models.adapters import AdapterSettings, add_adapter
from hpo.training.throughput import RECENT_STEPS, ThroughputMeter
from hpo.trial.telemetry import training_flops


def measure(meter: ThroughputMeter, now: list[float], seconds: Sequence[float]) -> ThroughputMeter:
    """Let steps of four examples in 40 of 50 places last so long."""
    meter.start()
    for step in seconds:
        now[0] += step
        meter.step(4, 4, 40, 50)
    return meter


def test_rates_leave_out_the_first_steps_and_what_is_between_stretches(now: list[float]) -> None:
    meter = measure(ThroughputMeter(CPU), now, [9.0, 9.0, 9.0, 2.0, 2.0])
    now[0] += 1000.0
    measure(meter, now, [4.0])
    assert meter.summary() == {
        "train_examples_per_second": pytest.approx(12 / 8),
        "train_tokens_per_second": pytest.approx(120 / 8),
        "step_seconds_p50": pytest.approx(2.0),
        "step_seconds_p95": pytest.approx(4.0),
        "padding_share": pytest.approx(0.2),
        "train_joules_per_example": None,
    }
    total = meter.totals()
    assert (total.seconds, total.tokens, total.windows) == (pytest.approx(35.0), 240, 24)


def test_fewer_steps_than_the_warm_up_still_have_a_rate(now: list[float]) -> None:
    summary = measure(ThroughputMeter(CPU), now, [2.0]).summary()
    assert summary["train_examples_per_second"] == pytest.approx(2.0)
    assert summary["step_seconds_p95"] == pytest.approx(2.0)
    assert set(ThroughputMeter(CPU).summary().values()) == {None}


def test_percentiles_are_those_of_the_last_thousand_steps(now: list[float]) -> None:
    seconds = np.random.default_rng(0).lognormal(sigma=0.8, size=2500)
    summary = measure(ThroughputMeter(CPU), now, seconds.tolist()).summary()
    for percent in (50, 95):
        expected = np.percentile(seconds[-RECENT_STEPS:], percent)
        assert summary[f"step_seconds_p{percent}"] == pytest.approx(expected, rel=0.01)


def test_the_state_does_not_grow_with_the_steps(now: list[float]) -> None:
    meter = measure(ThroughputMeter(CPU), now, [0.5] * 4000)
    assert len(meter.state_dict()["seconds"]) == RECENT_STEPS
    restored = ThroughputMeter(CPU)
    restored.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    assert restored.summary() == meter.summary()
    assert measure(restored, now, [3.0]).summary() == measure(meter, now, [3.0]).summary()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_s_steps_are_timed_by_its_events() -> None:
    meter = ThroughputMeter(probe_device("cuda"), warmup_steps=0)
    values = torch.randn(2000, 2000, device="cuda")
    meter.start()
    for _ in range(1500):  # more than are kept
        values = values @ values / 2000
        meter.step(1, 1, 10, 10)
    assert meter.totals().tokens == 15_000
    assert meter.totals().seconds > 0


@pytest.mark.parametrize(
    ("settings", "adapter", "within"),
    [
        ({}, None, 0.03),
        ({"freeze_layers": 1}, None, 0.09),
        ({}, AdapterSettings(adapter="lora", lora_rank=2), 0.09),
    ],
    ids=["all trained", "a frozen layer", "frozen weights under an adapter"],
)
def test_training_flops_agrees_with_torchs_count_of_matrix_products(
    settings: dict[str, Any], adapter: AdapterSettings | None, within: float
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    wide = {**BERT, "hidden_size": 64, "intermediate_size": 256}
    model = make_model(wide, attention="eager", **settings)
    if adapter is not None:
        add_adapter(model.encoder, adapter)
    with FlopCounterMode(display=False) as counter:
        scalar_loss(model, (16,) * 4).backward()
    # The count leaves out biases and norms, the estimate counts the products of the embedding's gradient.
    assert training_flops(model, 64, 4) == pytest.approx(counter.get_total_flops(), rel=within)
    assert training_flops(model, 0, 0) == 0


def test_training_flops_is_unknown_where_the_layers_are() -> None:
    albert = {**BERT, "model_type": "albert", "embedding_size": 16}
    assert training_flops(make_model(albert), 100, 10) is None
