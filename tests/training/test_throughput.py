"""Rates, percentiles and energy of steps; floating-point operations of a model."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.tiny import CPU
from support.tiny_encoders import BERT, DECODERS, make_model, scalar_loss
from torch.utils.flop_counter import FlopCounterMode

from hpo.models.adapters import AdapterSettings, add_adapter
from hpo.training.throughput import RECENT_STEPS, ThroughputMeter
from hpo.trial.telemetry import training_flops


def measure(meter: ThroughputMeter, now: list[float], seconds: Sequence[float]) -> ThroughputMeter:
    """Make steps of these durations, with four examples in 40 of 50 slots."""
    meter.start()
    for step in seconds:
        now[0] += step
        meter.step(4, 4, 40, 50)
    return meter


def test_rates_without_warm_up_and_pauses(now: list[float]) -> None:
    meter = ThroughputMeter(CPU)
    assert set(meter.summary().values()) == {None}
    measure(meter, now, [9.0])
    assert meter.summary()["train_examples_per_second"] == pytest.approx(4 / 9), "there are no other steps"
    measure(meter, now, [9.0, 9.0, 2.0, 2.0])
    now[0] += 1000.0
    measure(meter, now, [4.0])
    rates = {"train_examples_per_second": 12 / 8, "train_tokens_per_second": 120 / 8, "padding_share": 0.2}
    rates |= {"step_seconds_p50": 2.0, "step_seconds_p95": 4.0, "train_joules_per_example": None}
    assert meter.summary() == pytest.approx(rates)
    total = meter.totals()
    assert (total.seconds, total.tokens, total.windows) == (pytest.approx(35.0), 240, 24)


def test_percentiles_and_state_of_the_last_thousand_steps(now: list[float]) -> None:
    seconds = np.random.default_rng(0).lognormal(sigma=0.8, size=2500)
    meter = measure(ThroughputMeter(CPU), now, seconds.tolist())
    for percent in (50, 95):
        expected = np.percentile(seconds[-RECENT_STEPS:], percent)
        assert meter.summary()[f"step_seconds_p{percent}"] == pytest.approx(expected, rel=0.01)
    state = json.loads(json.dumps(meter.state_dict()))
    assert len(state["seconds"]) == RECENT_STEPS
    restored = ThroughputMeter(CPU)
    restored.load_state_dict(state)
    assert measure(restored, now, [3.0]).summary() == measure(meter, now, [3.0]).summary()


class Machine:
    """A machine with a counter of energy, whose meter has steps of four examples and one second."""

    missing = ""

    def __init__(self, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.joules, self.num_syncs = now, 5.0, 0
        monkeypatch.setattr("hpo.training.throughput.synchronize", self.synchronize)

    def synchronize(self, _: object) -> None:
        self.num_syncs += 1

    def read_joules(self) -> float:
        return self.joules

    def spend(self, seconds: float, watts: float) -> None:
        self.now[0] += seconds
        self.joules += watts * seconds

    def meter(self, state: dict[str, Any] | None = None, **settings: Any) -> ThroughputMeter:
        meter = ThroughputMeter(CPU, **{"counter": self} | settings)
        if state:
            meter.load_state_dict(json.loads(json.dumps(state)))
        meter.start()
        return meter

    def train(self, meter: ThroughputMeter, num_steps: int, watts: float = 100.0) -> None:
        for _ in range(num_steps):
            self.spend(1.0, watts)
            meter.step(4, 4, 40, 50)


@pytest.fixture
def machine(now: list[float], monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(now, monkeypatch)


def joules(meter: ThroughputMeter) -> Any:
    return meter.summary()["train_joules_per_example"]


def test_energy_of_steps_after_the_warm_up(machine: Machine) -> None:
    meter = machine.meter()
    machine.train(meter, 2, watts=500.0)  # the warm-up
    meter.stop()
    meter = machine.meter(meter.state_dict())
    machine.train(meter, 1, watts=500.0)
    num_syncs = machine.num_syncs
    machine.train(meter, 8)
    assert (machine.num_syncs, joules(meter)) == (num_syncs, None), "no step waits for the device"
    meter.stop()
    machine.spend(60.0, 30.0)  # an evaluation
    meter = machine.meter(meter.state_dict())
    machine.train(meter, 4, watts=200.0)
    meter.stop()
    machine.spend(60.0, 30.0)
    meter.stop()
    assert joules(meter) == pytest.approx((8 * 100 + 4 * 200) / (12 * 4))
    assert meter.summary()["train_examples_per_second"] == pytest.approx(4.0)


def test_energy_without_short_and_interrupted_stretches(machine: Machine) -> None:
    meter = machine.meter(warmup_steps=0)
    machine.train(meter, 1)
    meter.stop()
    assert joules(meter) is None, "the counter is too slow for one second"
    meter.start()
    machine.train(meter, 5)
    machine.spend(30.0, 250.0)  # compilation
    meter.start()
    machine.train(meter, 2, watts=40.0)
    meter.stop()
    assert joules(meter) == 10.0
    machine.missing, syncs = "it is gone.", machine.num_syncs
    meter = machine.meter(warmup_steps=0)
    machine.train(meter, 5)
    meter.stop()
    assert (joules(meter), machine.num_syncs) == (None, syncs)


@pytest.mark.parametrize(
    ("settings", "adapter", "within"),
    [
        ({}, None, 0.03),
        ({"freeze_layers": 1}, None, 0.09),
        ({}, AdapterSettings(adapter="lora", lora_rank=2), 0.09),
    ],
    ids=["all trained", "a frozen layer", "frozen weights under an adapter"],
)
def test_training_flops(settings: dict[str, Any], adapter: AdapterSettings | None, within: float) -> None:
    """torch counts matrix products: no biases and norms, but the embedding's gradient."""
    model = make_model({**BERT, "hidden_size": 64, "intermediate_size": 256}, attention="eager", **settings)
    if adapter is not None:
        add_adapter(model.encoder, adapter)
    with FlopCounterMode(display=False) as counter:
        scalar_loss(model, (16,) * 4).backward()
    assert training_flops(model, 64, 4) == pytest.approx(counter.get_total_flops(), rel=within)
    albert = {**BERT, "model_type": "albert", "embedding_size": 16}
    assert training_flops(make_model(albert), 100, 10) is None, "its layers are shared"
    mixtral = {**DECODERS["llama"], "model_type": "mixtral"}
    assert training_flops(make_model(mixtral), 100, 10) is None, "a token passes two of eight experts"
