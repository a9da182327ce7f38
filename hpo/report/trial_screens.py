"""Text and tables of `hpo train` and `hpo verify`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from hpo.outcome import TrialResult
from hpo.report.detailed import task_metrics_table
from hpo.report.formats import format_metric, format_seconds
from hpo.report.terminal import OUTCOME_STYLES, Part
from hpo.study.claims.lease import trial_attributes
from hpo.training.evaluate import Evaluation
from hpo.trial.compat import Compatibility
from hpo.trial.costs import Costs
from hpo.trial.verify import PrecisionCheck


def trial_record(metrics: Sequence[str], params: Mapping[str, Any], result: TrialResult) -> dict[str, Any]:
    values = None if result.values is None else dict(zip(metrics, result.values, strict=True))
    return {"params": params, "values": values, **trial_attributes(result)}


def trial(record: Mapping[str, Any]) -> Iterator[Part]:
    if record["telemetry"].get("metrics"):
        yield "Best evaluation", task_metrics_table(record["telemetry"])
    reason = f": {record['outcome_reason']}" if record["outcome_reason"] else ""
    yield Text.assemble((record["outcome"], OUTCOME_STYLES.get(record["outcome"], "")), reason)
    facts = [item for item in record.items() if item[0].startswith(("fp_precision", "train_", "peak_"))]
    for key, value in [*(record["values"] or {}).items(), *facts]:
        yield f"{key}: {value if isinstance(value, str) else format_metric(key, value)}"


def evaluation(metrics: Sequence[str], one: Evaluation) -> str:
    """Return a line for an evaluation during the trial of `hpo train`."""
    pairs = zip(metrics, one.values, strict=True)
    values = "  ".join(f"{name} {format_metric(name, value)}" for name, value in pairs)
    loss = "" if math.isnan(one.train_loss) else f"  loss {one.train_loss:.4g}"
    return f"step {one.step}  {one.budget_used:4.0%}  {format_seconds(one.seconds)}{loss}  {values}"


def verification(checks: Sequence[PrecisionCheck], device: str, advice: str) -> Iterator[Part]:
    yield Text(device, style="bold")
    yield "", [_precision(check) for check in checks]
    yield Text(
        "Speed (median of the repeats) and memory against fp32: forward and backward of a micro-batch.",
        style="dim",
    )
    yield from (f"{check.name}: {check.note}" for check in checks if check.note)
    yield Text(advice, style="bold")


def _precision(check: PrecisionCheck) -> dict[str, str]:
    result = check.compatibility
    return {
        "precision": check.name,
        "support": check.support.level,
        "verdict": result.verdict if result else "",
        **_errors(result),
        "speed": _ratio(result.costs if result else None, "speed_ratio"),
        "memory": _ratio(result.costs if result else None, "memory_ratio"),
    }


def _errors(check: Compatibility | None) -> dict[str, str]:
    measured = check.measurement if check else None
    error = max(measured.logits_relative_error.values(), default=None) if measured else None
    cosine = measured.gradient_cosine if measured else None
    return {
        "logits\nerror": "" if error is None else f"{error:.1e}",
        "gradient\ncosine": "" if cosine is None else f"{cosine:.6f}",
    }


def _ratio(costs: Costs | None, name: str) -> str:
    ratio = getattr(costs, name, None)
    return "" if ratio is None else f"{ratio:.2f}x"
