"""The command `predict`: a trained model on a file of texts."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.api.messages import progress_shown
from hpo.cli.options import JsonOption, TrustCodeOption, TrustOption, app, print_json
from hpo.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpo.data.examples import Example
    from hpo.inference.model import TrainedModel

LOG_SECONDS = 10.0


@app.command()
def predict(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A folder that `hpo best --export` or `hpo deploy` wrote.")
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Texts: .jsonl, .csv, .parquet, else one a line.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where predictions go: .jsonl, .csv or .parquet.",
            show_default="jsonl on standard output",
        ),
    ] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="List rows that cannot be read, and predict the others.")
    ] = False,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="PRECISION",
            help="That to compute in.",
            show_default="the trial's, or fp32 where the device lacks it",
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Predict the labels, numbers and spans of texts, a row each in the form of a data row, with scores.

    A row that cannot be read is listed with its line, and nothing is predicted then, unless --skip-bad-rows.
    """
    from hpo.device import limit_threads, probe_device
    from hpo.inference.model import load
    from hpo.inference.rows import check_output
    from hpo.memory import disable_malloc_trim

    if output is not None:
        check_output(output)
    with progress_shown(quiet=as_json):
        trained = load(model, device=device, precision=precision, trust_remote_code=trust_remote_code)
        examples, bad = _read(file, trained, skip_bad_rows=skip_bad_rows, quiet=as_json)
        if trained.device.type == "cpu":
            limit_threads(probe_device("cpu"))
            disable_malloc_trim()
        told: dict[str, Any] = {"num_predictions": len(examples), "left_out": bad}
        told |= _predict(trained, examples, output, as_json=as_json)
    if as_json:
        print_json(told)
    elif output is not None:
        typer.echo(f"{len(examples):,} predictions are in {output}.", err=True)


def _predict(
    trained: TrainedModel, examples: list[Example], output: Path | None, *, as_json: bool
) -> dict[str, Any]:
    """Write the predictions to `output`, or print them; returns what `--json` tells of them."""
    from hpo.inference.rows import json_line, predicted_row, predictions_file

    numbered = iter(examples)
    chunks = trained.predict_examples(examples, on_progress=_progress(len(examples)))
    predicted = ([predicted_row(next(numbered), one) for one in chunk] for chunk in chunks)
    if output is not None:
        with predictions_file(output, trained.tasks) as write:
            for rows in predicted:
                write(rows)
        return {"output": str(output)}
    if as_json:
        return {"predictions": [row for rows in predicted for row in rows]}
    for rows in predicted:
        typer.echo("\n".join(map(json_line, rows)))
    return {}


def _read(
    file: Path, trained: TrainedModel, *, skip_bad_rows: bool, quiet: bool
) -> tuple[list[Example], list[str]]:
    """The rows that can be predicted, and the others. Raises DataError where there are others unasked."""
    from hpo.data.examples import listed
    from hpo.inference.rows import read_examples

    examples, bad = read_examples(file, trained)
    if bad and not (skip_bad_rows and examples):
        rows = "1 row" if len(bad) == 1 else f"{len(bad):,} rows"
        hint = " or --skip-bad-rows" if examples else ""
        raise DataError(f"{rows} of {file} cannot be read; mend{hint}:{listed(bad)}")
    if bad and not quiet:
        total = len(bad) + len(examples)
        typer.echo(f"{len(bad):,} of {total:,} rows are left out:{listed(bad)}", err=True)
    return examples, bad


def _progress(total: int) -> Callable[[float], None]:
    """Says on the logger how far it is, about every ten seconds."""
    logger = logging.getLogger("hpo.inference")
    logger.info("predicting %s texts", f"{total:,}")
    last = time.monotonic()

    def tell(done: float) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= LOG_SECONDS:
            last = now
            logger.info("predicted %s of %s texts", f"{int(done):,}", f"{total:,}")

    return tell
