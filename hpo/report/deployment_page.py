"""The page of `hpo deploy`, in the style of the report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hpo.report.deployed import (
    latency_charts,
    latency_table,
    loading,
    quality_table,
    sentences,
    task_table,
    threads,
    verdict,
)
from hpo.report.page import plot, render


def deployment_html(found: Mapping[str, Any], model: str) -> str:
    """The page of a `Deployment.as_json()`, whose chosen artifact lies in the folder `model`."""
    device = found["device"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return render(
        "deploy.html.j2",
        name=found["study"],
        facts=[
            f"Chosen on {found['num_examples']:,} rows of validation.",
            f"Timed on {device['name']} ({', '.join(device['features'])}), {threads(found)}.",
            f"{versions}. Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        ],
        verdict=verdict(found),
        loading=loading(found, model),
        sentences=sentences(found),
        charts=[(chart, plot(chart)) for chart in latency_charts(found)],
        quality=quality_table(found),
        latency=latency_table(found),
        tasks=task_table(found),
        unit=found["unit"],
        max_drop=f"{found['max_drop']:g}",
    )
