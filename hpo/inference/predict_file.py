"""Predictions for a file of texts: the library of `hpo predict`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.data.examples import problem_list
from hpo.device import limit_threads, probe_device
from hpo.errors import DataError
from hpo.inference.model import TrainedModel
from hpo.inference.rows import Row, check_output, json_line, predicted_row, predictions_file, read_examples
from hpo.memory import disable_malloc_trim
from hpo.tasks.example import Example

LOG_SECONDS = 10.0

_logger = logging.getLogger("hpo.inference")


@dataclass
class FilePredictions:
    """The predictions for a file. Without an `output`, they are made while `rows` is read."""

    num_predictions: int
    left_out: list[str]
    """Rows that cannot be read, each with its line."""
    rows: Iterator[list[Row]]
    output: Path | None

    def as_json(self) -> dict[str, Any]:
        told = {"num_predictions": self.num_predictions, "left_out": self.left_out}
        if self.output is not None:
            return told | {"output": str(self.output)}
        return told | {"predictions": [row for rows in self.rows for row in rows]}

    def lines(self) -> Iterator[str]:
        """The predictions as JSON, some lines at a time."""
        yield from ("\n".join(map(json_line, rows)) for rows in self.rows)


def predict_file(
    model: TrainedModel, file: Path, output: Path | None = None, *, skip_bad_rows: bool = False
) -> FilePredictions:
    """Predict the texts of `file`, into `output` if it is given.

    Raises DataError if a row cannot be read, unless `skip_bad_rows`, and InputError if `output` cannot be
    written.
    """
    if output is not None:
        check_output(output)
    examples, bad = read_examples(file, model)
    if bad and not (skip_bad_rows and examples):
        num = "1 row" if len(bad) == 1 else f"{len(bad):,} rows"
        hint = " or --skip-bad-rows" if examples else ""
        raise DataError(f"{num} of {file} cannot be read; mend{hint}:{problem_list(bad)}")
    if bad:
        total = len(bad) + len(examples)
        _logger.info("%s of %s rows are left out:%s", f"{len(bad):,}", f"{total:,}", problem_list(bad))
    if model.device.type == "cpu":
        limit_threads(probe_device("cpu"))
        disable_malloc_trim()
    rows = _predicted(model, examples)
    if output is not None:
        with predictions_file(output, model.tasks) as write:
            for chunk in rows:
                write(chunk)
        _logger.info("%s predictions are in %s.", f"{len(examples):,}", output)
    return FilePredictions(len(examples), [": ".join(one) for one in bad], rows, output)


def _predicted(model: TrainedModel, examples: list[Example]) -> Iterator[list[Row]]:
    numbered = iter(examples)
    for chunk in model.predict_examples(examples, on_progress=_progress(len(examples))):
        yield [predicted_row(next(numbered), one) for one in chunk]


def _progress(total: int) -> Callable[[float], None]:
    """Log the progress about every ten seconds."""
    _logger.info("predicting %s texts", f"{total:,}")
    last = time.monotonic()

    def tell(done: float) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= LOG_SECONDS:
            last = now
            _logger.info("predicted %s of %s texts", f"{int(done):,}", f"{total:,}")

    return tell
