"""The commands that use the model of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import typer

import hpo
from hpo.cli.options import (
    IN_POINTS,
    TRUST,
    Answer,
    argument,
    command,
    flag,
    folder,
    optional,
    print_json,
    study_command,
)


@study_command(
    *TRUST,
    folder=folder("Folder.", "--out", default="runs/STUDY/deploy"),
    timeout=optional(float, "SECONDS", "No further form is begun after so long.", "1800", min=1),
    max_drop=optional(float, "POINTS", f"What loses more is refused. {IN_POINTS}", "1", min=1e-6),
    batch=optional(int, "SIZE", "Batch whose latency decides: 1 or 32.", "1"),
    threads=optional(int, "N", "Threads.", "one a core", min=1, max=1024),
    artifacts=optional(str, "NAMES", "Forms beside fp32: bf16,onnx_int8_dynamic.", "all that run here"),
    device=optional(Literal["auto", "cpu", "cuda"], "DEVICE", "auto, cpu or cuda.", "cpu"),
)
def deploy(study: hpo.Study, **options: Any) -> Answer:
    """Find the fastest form of the best model that is as good as fp32: bf16, fp16, ONNX, int8.

    Chosen on validation, reported on test. Writes it to DIR/model, and the numbers to DIR/deploy.json.
    Ctrl-C ends the search with the forms that are scored by then; a second one leaves nothing.
    """
    from hpo.report.deployed import deployment_parts

    stored = study.deploy(**options)
    code = 130 if stored.pop("was_stopped") else 0
    return Answer(stored, deployment_parts(stored), code)


@command(
    *TRUST,
    model=argument(Path, "MODEL", "A folder that `hpo best --export` or `hpo deploy` wrote."),
    file=argument(Path, "FILE", "Texts: .jsonl, .csv, .parquet, else one a line."),
    output=optional(Path, "FILE", "Predictions: .jsonl, .csv or .parquet.", "jsonl on standard output"),
    skip_bad_rows=flag("--skip-bad-rows", "List rows that cannot be read, and predict the others."),
    device=optional(str, "DEVICE", "auto, cpu, cuda or cuda:N.", "auto"),
    precision=optional(str, "NAME", "Precision.", "the trial's, or fp32 where the device lacks it"),
)
def predict(
    model: Path,
    file: Path,
    *,
    as_json: bool,
    output: Path | None = None,
    skip_bad_rows: bool = False,
    **options: Any,
) -> None:
    """Predict the labels, numbers and spans of texts, a row each in the form of a data row, with scores.

    A row that cannot be read is listed with its line, and nothing is predicted then, unless --skip-bad-rows.
    """
    from hpo.api.messages import progress_shown
    from hpo.inference.predict_file import predict_file

    with progress_shown(quiet=as_json):
        found = predict_file(hpo.load(model, **options), file, output, skip_bad_rows=skip_bad_rows)
        if as_json:
            print_json(found.as_json())
        else:
            for lines in found.lines():
                typer.echo(lines)
