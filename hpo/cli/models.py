"""The commands for a trained model."""

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
    timeout=optional(float, "SECONDS", "Begin no further form after this time.", "1800", min=1),
    max_drop=optional(float, "POINTS", f"Largest acceptable loss. {IN_POINTS}", "1", min=1e-6),
    batch=optional(int, "SIZE", "Batch size of the decisive latency: 1 or 32.", "1"),
    threads=optional(int, "N", "Number of threads.", "one for each core", min=1, max=1024),
    artifacts=optional(str, "NAMES", "Forms besides fp32: bf16,onnx_int8_dynamic.", "all available"),
    device=optional(Literal["auto", "cpu", "cuda"], "DEVICE", "auto, cpu or cuda.", "cpu"),
)
def deploy(study: hpo.Study, **options: Any) -> Answer:
    """Find the fastest form of the best model that is as good as fp32: bf16, fp16, ONNX, int8.

    The choice uses the validation split, the report the test split. The model is in DIR/model, the numbers
    are in DIR/deploy.json. Ctrl-C ends the search with the scored forms; a second one leaves nothing.
    """
    from hpo.report.verdicts import deployment_parts

    stored = study.deploy(**options)
    code = 130 if stored.pop("was_stopped") else 0
    return Answer(stored, deployment_parts(stored), code)


@command(
    *TRUST,
    model=argument(Path, "MODEL", "A folder of `hpo best --export` or `hpo deploy`."),
    file=argument(
        Path,
        "FILE",
        "Texts: .jsonl, .csv or .parquet with the study's text column; any other file has one a line.",
    ),
    output=optional(Path, "FILE", "Predictions: .jsonl, .csv or .parquet.", "JSON lines on standard output"),
    skip_bad_rows=flag("--skip-bad-rows", "List unreadable rows, and predict the others."),
    device=optional(str, "DEVICE", "auto, cpu, cuda or cuda:N.", "auto"),
    precision=optional(str, "NAME", "Precision.", "the trial's, or fp32 if the device lacks it"),
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
    """Predict labels, numbers and spans of texts, with scores; one row for each text, like a data row.

    If rows are unreadable, they are listed and nothing is predicted, unless you give --skip-bad-rows.
    """
    from hpo.api.opening import progress_shown
    from hpo.inference.predict_file import predict_file

    with progress_shown(quiet=as_json):
        predicted = predict_file(hpo.load(model, **options), file, output, skip_bad_rows=skip_bad_rows)
        if as_json:
            print_json(predicted.as_json())
        else:
            for lines in predicted.lines():
                typer.echo(lines)
