"""The command `predict`: a trained model on a file of texts."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import JsonOption, StorageOption, TrustOption, app, load_file, print_json, progress_shown
from hpo.errors import DataError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpo.data.examples import Example
    from hpo.inference.model import TrainedModel

LOG_SECONDS = 10.0


@app.command()
def predict(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder that --export wrote, or a study: its best trial.")
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
    storage: StorageOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict the labels, numbers and spans of texts, a row each in the form of a data row, with scores.

    A row that cannot be read is listed with its line, and nothing is predicted then, unless --skip-bad-rows.
    """
    from hpo.device import limit_threads, probe_device
    from hpo.inference.rows import check_output, json_line, predicted_row, predictions_file
    from hpo.memory import disable_malloc_trim

    if output is not None:
        check_output(output)
    with progress_shown(quiet=as_json):
        trained = _load(model, storage, device, precision, trust_remote_code=trust_remote_code)
        examples, bad = _read(file, trained, skip_bad_rows=skip_bad_rows, quiet=as_json)
        if trained.device.type == "cpu":
            limit_threads(probe_device("cpu"))
            disable_malloc_trim()
        numbered = iter(examples)
        chunks = trained.predict_examples(examples, on_progress=_progress(len(examples)))
        found = ([predicted_row(next(numbered), one) for one in chunk] for chunk in chunks)
        told: dict[str, Any] = {"num_predictions": len(examples), "left_out": bad}
        if output is not None:
            with predictions_file(
                output, trained.tasks, trained.settings.windowing.pair_segments or ()
            ) as write:
                for of_chunk in found:
                    write(of_chunk)
            told["output"] = str(output)
        elif as_json:
            told["predictions"] = [row for of_chunk in found for row in of_chunk]
        else:
            for of_chunk in found:
                typer.echo("\n".join(map(json_line, of_chunk)))
    if as_json:
        print_json(told)
    elif output is not None:
        typer.echo(f"{len(examples):,} predictions are in {output}.", err=True)


def _read(
    file: Path, trained: TrainedModel, *, skip_bad_rows: bool, quiet: bool
) -> tuple[list[Example], list[str]]:
    """The rows that can be predicted, and the others. Raises DataError where there are others unasked."""
    from hpo.inference.rows import listed, read_examples

    examples, bad = read_examples(file, trained)
    if bad and not (skip_bad_rows and examples):
        rows = "1 row" if len(bad) == 1 else f"{len(bad):,} rows"
        hint = " or --skip-bad-rows" if examples else ""
        raise DataError(f"{rows} of {file} cannot be read; mend{hint}:{listed(bad)}")
    if bad and not quiet:
        total = len(bad) + len(examples)
        typer.echo(f"{len(bad):,} of {total:,} rows are left out:{listed(bad)}", err=True)
    return examples, bad


def _load(
    model: str, storage: str | None, device: str, precision: str | None, *, trust_remote_code: bool
) -> TrainedModel:
    """The model of a folder, or of the best trial of a study, which is exported for it and loaded as any."""
    from hpo.cli.options import checkpoint_of, config_of, existing_study
    from hpo.inference.model import load
    from hpo.study.study_record import best_trials
    from hpo.trial.best_model import export_checkpoint
    from hpo.trial.provenance import TrialSource

    if (Path(model) / "hpo.json").is_file() or _is_no_study(model):
        return load(model, device=device, precision=precision, trust_remote_code=trust_remote_code)
    with existing_study(model, storage) as (database, record):
        trials = best_trials(record)
        if not trials:
            raise RunError(f"the study {record.name} has no complete trial yet, whose model could predict.")
        config = config_of(model, record, trust_remote_code)
        executor, folder = checkpoint_of(config, database, trials[0].number)
    logging.getLogger("hpo.inference").info("predicting with trial %d", trials[0].number)
    with tempfile.TemporaryDirectory(prefix="hpo-predict-") as temporary:
        source = TrialSource(trials[0].number, trials[0].params, trials[0].telemetry)
        exported = export_checkpoint(executor, folder, Path(temporary, "model"), source, score_test=False)
        return load(exported, device=device, precision=precision, trust_remote_code=trust_remote_code)


def _is_no_study(model: str) -> bool:
    """Whether it can only be a folder: a path, or the name of a folder here and of no study file."""
    path = Path(model)
    if path.suffix in (".yaml", ".yml"):
        return False
    if "/" in model:
        return True
    return path.is_dir() and load_file(model) is None


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
