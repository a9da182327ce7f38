"""The verdict on a measurement, and what it is kept under."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import CPU, tiny_executor

import hpo.trial.compat
from hpo.config.study_config import CompatConfig
from hpo.config.trial_config import build_trial_config
from hpo.data.batches import Batch
from hpo.device import DeviceInfo
from hpo.precision.table import resolve
from hpo.trial.compat import Compatibility, cache_key, check_compatibility, judge
from hpo.trial.executor import Executor
from hpo.trial.measure import Measurement, measure
from hpo.trial.trial_parts import TrialParts

BOUNDS = CompatConfig()


def parts_of(executor: Executor, **params: Any) -> TrialParts:
    config = build_trial_config(executor.study, params, "fp32", executor.amp)
    return executor.parts(config, resolve("fp32", CPU, config.amp))


def key_of(executor: Executor, device: DeviceInfo = CPU, **params: Any) -> str:
    parts = parts_of(executor, **params)
    return cache_key(parts, executor.study, executor.dataset.fingerprint, device)


def test_batches_of_the_shortest_and_the_longest_windows(tmp_path: Path) -> None:
    parts = parts_of(tiny_executor(tmp_path))
    lengths = sorted(parts.train_split.lengths_W)
    assert sorted(parts.batch(2, 1).lengths_B) == [*lengths[:2], lengths[-1]]
    assert sorted(parts.batch(0, 10**6).lengths_B) == lengths == sorted(parts.batch(10**6).lengths_B)


def test_attention_with_dropout_is_another_measurement(tmp_path: Path) -> None:
    """It has a kernel of its own; its rate does not matter, since the check drops nothing."""
    executor = tiny_executor(tmp_path)
    keys = {rate: key_of(executor, attention_dropout=rate) for rate in (None, 0.0, 0.1, 0.2)}
    assert len(set(keys.values())) == 3
    assert keys[0.1] == keys[0.2]
    assert key_of(executor, attention_dropout=0.0, learning_rate=1e-5) == keys[0.0]


def test_a_new_way_to_measure_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = tiny_executor(tmp_path)
    before = key_of(executor)
    monkeypatch.setattr(hpo.trial.compat, "MEASUREMENT_VERSION", 10**6)
    assert key_of(executor) != before


class Cache:
    """A compatibility cache that holds JSON, as a database does."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}

    def get_compat(self, key: str) -> Any:
        return json.loads(self.stored.get(key, "null"))

    def put_compat(self, key: str, result: Any) -> Any:
        self.stored[key] = json.dumps(result)
        return result


def check(executor: Executor, cache: Cache, device: DeviceInfo = CPU) -> Compatibility:
    fingerprint = executor.dataset.fingerprint
    return check_compatibility(parts_of(executor), executor.study, fingerprint, device, cache)


def test_a_measurement_is_made_once(tmp_path: Path) -> None:
    executor, cache = tiny_executor(tmp_path), Cache()
    first, second = check(executor, cache), check(executor, cache)
    assert (first.verdict, first.cached, second.cached) == ("ok", False, True)
    assert second.measurement == first.measurement


@pytest.mark.parametrize(
    "other",
    [
        replace(CPU, name="another CPU"),
        replace(CPU, cpu_features=frozenset({"amx_bf16"})),
        replace(CPU, type="cuda", compute_capability=(9, 0)),
        replace(CPU, cuda_version="13.0"),
    ],
    ids=["name", "instructions", "capability", "CUDA"],
)
def test_a_result_of_one_kind_of_device_is_not_used_on_another(
    other: DeviceInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, cache = tiny_executor(tmp_path), Cache()
    assert check(executor, cache).verdict == "ok"
    breaks = Measurement("fp32", finite=False, nonfinite="logits are")
    monkeypatch.setattr("hpo.trial.compat.measure", lambda *_: breaks)
    assert check(executor, cache, other).verdict == "incompatible"
    assert check(executor, cache, replace(CPU, host="elsewhere", total_memory_bytes=1)).verdict == "ok"
    assert len(cache.stored) == 2


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("torch", "9.9"),
        ("transformers", "9.9"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
    ],
)
def test_versions_and_instructions_taken_away_are_another_measurement(
    changed: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = tiny_executor(tmp_path)
    before = key_of(executor)
    if changed.islower():
        monkeypatch.setattr(getattr(hpo.trial.compat, changed), "__version__", value)
    else:
        monkeypatch.setenv(changed, value)
    assert key_of(executor) != before


def test_a_check_without_fp32_is_not_kept_for_machines_with_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, cache = tiny_executor(tmp_path), Cache()
    alone = Measurement("fp32", reference_fits=False)
    monkeypatch.setattr("hpo.trial.compat.measure", lambda *_: alone)
    assert check(executor, cache).measurement == alone
    monkeypatch.undo()
    assert check(executor, cache).measurement.gradient_cosine == pytest.approx(1)
    assert len(cache.stored) == 1


def test_the_longest_text_alone_is_said_and_not_kept_for_machines_with_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, cache = tiny_executor(tmp_path), Cache()

    def little_memory(parts: TrialParts, batch: Batch, *rest: Any) -> Measurement:
        if len(batch.lengths_B) > 1:
            raise MemoryError
        return measure(parts, batch, *rest)

    monkeypatch.setattr("hpo.trial.compat.measure", little_memory)
    found = check(executor, cache)
    assert (found.verdict, found.measurement.longest_alone) == ("ok", True)
    (reason,) = found.reasons
    assert reason.endswith("so fp32 was compared with fp32 on the longest alone.")
    monkeypatch.undo()
    found = check(executor, cache)
    assert (found.cached, found.reasons, found.measurement.longest_alone) == (False, (), False)
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
def test_the_bounds_of_the_study_decide(error: float, cosine: float, verdict: str) -> None:
    measurement = Measurement("bf16", logits_relative_error={"topic": error}, gradient_cosine=cosine)
    found = judge(measurement, BOUNDS)
    assert found.verdict == verdict
    assert bool(found.reasons) == (verdict != "ok")
