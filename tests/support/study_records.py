"""Made-up studies as the storage would return them. No number here was measured."""

import dataclasses
import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from hpo.report.tables import StudyTables
from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.study.store.schema import EvaluationRow

DEVICE = {"type": "cpu", "name": "Example CPU", "cpu_features": ["amx_bf16"], "num_threads": 2}
DEVICE |= {"host": "node1", "shared": False, "torch": "2.13.0", "transformers": "5.23.0"}
DEFINITION: dict[str, Any] = {
    "name": "fake",
    "n_trials": 40,
    "training": {"epochs": 2.0, "seed": 42, "head_hidden_size": None},
    "search_space": {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16", "tf32"]},
        "learning_rate": {"type": "float", "low": 1e-5, "high": 1e-3, "log": True},
        "batch_size": {"type": "categorical", "choices": [8, 16, 32]},
        "head_type": {"type": "categorical", "choices": ["linear", "mlp"]},
        "init_scale": {"type": "categorical", "choices": [1024, 65536], "when": {"fp_precision": "fp16"}},
    },
}
DISTRIBUTIONS: dict[str, BaseDistribution] = {
    name: CategoricalDistribution(entry["choices"])
    for name, entry in DEFINITION["search_space"].items()
    if "choices" in entry
} | {"learning_rate": FloatDistribution(1e-5, 1e-3, log=True)}
START = datetime(2026, 1, 5, 9, 0, tzinfo=UTC)
EXAMPLES_PER_SECOND = {"fp32": 24.0, "bf16": 29.0, "fp16": 6.0, "tf32": 30.0, "bf16-true": 30.0}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "tf32": "float32"}
DTYPES["bf16-true"] = "bfloat16"
NO_TF32 = "`tf32` needs compute capability >= 8.0, but Example CPU has no TF32. Use fp32 or bf16."
ENDINGS = {
    # trial number: outcome other than complete, and why
    3: ("unsupported", NO_TF32),
    5: ("pruned", "the pruner stopped it at step 40 (score 0.31)"),
    8: ("nonfinite", "the loss of `criteria` was NaN in 5 micro-batches of one epoch"),
    11: ("unsupported", NO_TF32),
    13: ("incompatible", "gradients are not finite; first in `encoder.layer.3.attention`"),
    16: ("pruned", "the pruner stopped it at step 40 (score 0.28)"),
    19: ("oom", "one example of 512 tokens does not fit into 2 GiB"),
    22: ("failed", "RuntimeError: <worker> lost & gone"),
    25: ("pruned", "the pruner stopped it at step 80 (score 0.44)"),
    27: ("unsupported", NO_TF32),
    30: ("nonfinite", "the scale fell to its floor of 1"),
    38: ("preempted", "told to stop at step 60; the checkpoint is written"),
    39: ("running", ""),
}


def fake_record() -> StudyRecord:
    """40 trials over four precisions with every outcome, a fallback, a shared device and a trial whose
    precision facts disagree."""
    random_numbers = random.Random(7)
    precisions = ["fp32", "bf16", "fp16", "bf16"]
    trials = []
    for number in range(40):
        outcome, reason = ENDINGS.get(number, ("complete", ""))
        precision = "tf32" if outcome == "unsupported" else precisions[number % 4]
        if outcome == "nonfinite":
            precision = "fp16"
        trials.append(_trial(random_numbers, number, precision, outcome, reason))
    observed = {**trials[9].telemetry["precision"]["observed"], "linear_products": {"float32": 38}}
    reason = "38 weights were not multiplied in bfloat16"
    trials[9].telemetry["precision"] |= {"agrees": False, "reason": reason, "observed": observed}
    trials[10].telemetry["precision"] |= {"effective": "fp32", "reason": "fp16 is not native here"}
    trials[12].telemetry["device"]["shared"] = True
    return record_of(trials, counts={"open": 1, "running": 1, "done": 38})


def fake_trial(number: int, precision: str, outcome: str = "complete") -> TrialRecord:
    """One trial; the same numbers for the same arguments."""
    return _trial(random.Random(number), number, precision, outcome)


def with_values(number: int, values: tuple[float, ...], **params: Any) -> TrialRecord:
    trial = fake_trial(number, "fp32")
    return dataclasses.replace(trial, values=values, params={**trial.params, **params})


def record_of(trials: list[TrialRecord], **changes: Any) -> StudyRecord:
    counts = {"open": 40, "running": 0, "done": 0}
    record = StudyRecord("fake", ("score",), ("maximize",), DEFINITION, trials, workers=[], counts=counts)
    return dataclasses.replace(record, **changes)


def tables_of(trials: list[TrialRecord], **changes: Any) -> StudyTables:
    return StudyTables(record_of(trials, **changes))


def fake_tables() -> StudyTables:
    return StudyTables(fake_record())


def _trial(draw: random.Random, number: int, precision: str, outcome: str, reason: str = "") -> TrialRecord:
    params: dict[str, Any] = {
        "fp_precision": precision,
        "learning_rate": 10 ** draw.uniform(-5, -3),
        "batch_size": draw.choice([8, 16, 32]),
        "head_type": draw.choice(["linear", "mlp"]),
    }
    if precision == "fp16":
        params["init_scale"] = draw.choice([1024, 65536])
    batch_size = params["batch_size"]
    peak = 0.82 - 0.12 * (math.log10(params["learning_rate"]) + 3.7) ** 2 + draw.gauss(0, 0.01)
    started_training = outcome not in ("unsupported", "incompatible", "oom")
    speed = EXAMPLES_PER_SECOND[precision] * batch_size**0.15 * draw.uniform(0.95, 1.05)
    speeds = {"train_examples_per_second": speed, "train_tokens_per_second": speed * 130}
    num_evaluations = {"complete": 4, "pruned": 1, "preempted": 1, "running": 1}.get(outcome, 0)
    train_seconds = 2400 / speed * max(num_evaluations, 1) / 4 if started_training else 0.0
    seconds = 3.0 + train_seconds
    evaluations = [
        EvaluationRow(
            step=40 * index,
            epoch=0.5 * index,
            seconds=3.0 + train_seconds * index / num_evaluations,
            metrics={"score": level - 0.05, **_metrics(level)},
            **speeds,
        )
        for index in range(1, num_evaluations + 1)
        for level in [peak * (1 - math.exp(-index))]
    ]
    score = peak * (1 - math.exp(-4)) - 0.05 if outcome == "complete" else None
    support = {"fp16": "emulated", "tf32": "unsupported"}.get(precision, "native")
    ran = started_training and outcome != "failed"
    telemetry: dict[str, Any] = {
        "precision": {"requested": precision, "effective": None, "support": support, "reason": ""},
        "device": dict(DEVICE),
        "compatibility": {"verdict": "degraded" if number == 6 else "ok", "reasons": []},
    }
    if ran:
        seen = {"linear_products": {DTYPES[precision]: 38}, "tf32": False, "compiled": False}
        telemetry["precision"] |= {"effective": precision, "observed": seen, "agrees": True}
        telemetry |= {
            "metrics": _metrics(peak * (1 - math.exp(-4))),
            "throughput": {**speeds, "evaluation_examples_per_second": speed * 3},
            "scaler": {"skipped_steps": 3 if precision == "fp16" else 0},
            "fp32_fallbacks": 1 if number == 8 else 0,
            "device_utilization": 0.62,
            "peak_memory_bytes": int((900 if precision == "fp32" else 640) * 2**20 * batch_size**0.3),
            "num_steps": 40 * num_evaluations,
        }
    begun = START + timedelta(seconds=100 * number)
    ended = outcome != "running"
    states = {"complete": "COMPLETE", "failed": "FAIL", "running": "RUNNING", "preempted": "RUNNING"}
    return TrialRecord(
        number=number,
        state=states.get(outcome, "PRUNED"),
        outcome=outcome,
        reason=reason,
        params=params,
        values=None if score is None else (score,),
        started=begun,
        ended=begun + timedelta(seconds=seconds) if ended else None,
        seconds=seconds if ended else None,
        attributes={"worker": "node1-0"},
        telemetry=telemetry,
        evaluations=evaluations,
    )


def _metrics(level: float) -> dict[str, dict[str, float]]:
    """Their score is `level` - 0.05."""
    return {
        "criteria": {"f1_macro": level, "f1_micro": level + 0.03},
        "evidence": {"span_f1": level - 0.1, "span_overlap_f1": level},
    }
