"""The commands that use the model of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import typer

import hpo
from hpo.cli.options import TRUST, Answer, argument, command, flag, folder, option, print_json, study_command


@study_command(
    *TRUST,
    folder=folder("Folder.", "--out", show_default="runs/STUDY/deploy"),
    timeout=option(
        float | None,
        "SECONDS",
        "After so long no further form is begun, and the choice is among those that are scored.",
        min=1,
        show_default="1800",
    ),
    max_drop=option(
        float | None,
        "POINTS",
        "What loses more is refused; in hundredths, of mae and rmse in the labels' units.",
        min=1e-6,
        show_default="1",
    ),
    batch=option(int | None, "SIZE", "Batch whose latency decides: 1 or 32.", show_default="1"),
    threads=option(int | None, "N", "Threads.", min=1, max=1024, show_default="one a core"),
    artifacts=option(
        str | None,
        "NAMES",
        "Which, beside fp32: bf16,onnx_int8_dynamic.",
        show_default="all that this machine can have",
    ),
    device=option(Literal["auto", "cpu", "cuda"] | None, "DEVICE", "auto, cpu or cuda.", show_default="cpu"),
)
def deploy(study: hpo.Study, **options: Any) -> Answer:
    """Find the fastest form of the best model that is as good as fp32: bf16, fp16, ONNX, int8.

    Chosen on validation, reported on test. Writes it to DIR/model, and the numbers to DIR/deploy.json.
    Ctrl-C ends the search with the forms that are scored by then; a second one leaves nothing.
    """
    from hpo.report.deployed import shown

    stored = study.deploy(**options)
    code = 130 if stored.pop("was_stopped") else 0
    return Answer(stored, shown(stored), code)


@command(
    *TRUST,
    model=argument(Path, "MODEL", "A folder that `hpo best --export` or `hpo deploy` wrote."),
    file=argument(Path, "FILE", "Texts: .jsonl, .csv, .parquet, else one a line."),
    output=option(
        Path | None,
        "FILE",
        "Where predictions go: .jsonl, .csv or .parquet.",
        show_default="jsonl on standard output",
    ),
    skip_bad_rows=flag("--skip-bad-rows", "List rows that cannot be read, and predict the others."),
    device=option(str | None, "DEVICE", "auto, cpu, cuda or cuda:N.", show_default="auto"),
    precision=option(
        str | None,
        "PRECISION",
        "That to compute in.",
        show_default="the trial's, or fp32 where the device lacks it",
    ),
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
