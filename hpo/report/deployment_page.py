"""The page of `hpo deploy`, in the style of the report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hpo.report.deployed import (
    latency_table,
    loading,
    quality_table,
    sentences,
    task_table,
    threads,
    verdict,
)
from hpo.report.templates import fill


def deployment_html(stored: Mapping[str, Any], model: str) -> str:
    """The page of a `Deployment.as_json()`, whose chosen artifact lies in the folder `model`."""
    device = stored["device"]
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    return fill(
        "deploy.html.j2",
        name=stored["study"],
        facts=[
            f"Chosen on {stored['num_examples']:,} rows of validation.",
            f"Timed on {device['name']} ({', '.join(device['features'])}), {threads(stored)}.",
            f"{versions}. Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        ],
        verdict=verdict(stored),
        loading=loading(stored, model),
        sentences=sentences(stored),
        quality=quality_table(stored),
        latency=latency_table(stored),
        tasks=task_table(stored),
        unit=stored["unit"],
        max_drop=f"{stored['max_drop']:g}",
    )
