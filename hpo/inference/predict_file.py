"""Predictions for a file of texts (`hpo predict`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.data.examples import listed
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
    """Predictions for a file. Without an `output`, reading `rows` makes them."""

    num_predictions: int
    left_out: list[str]
    """Unreadable rows, with line and problem."""
    rows: Iterator[list[Row]]
    output: Path | None

    def as_json(self) -> dict[str, Any]:
        content = {"num_predictions": self.num_predictions, "left_out": self.left_out}
        if self.output is not None:
            return content | {"output": str(self.output)}
        return content | {"predictions": [row for rows in self.rows for row in rows]}

    def lines(self) -> Iterator[str]:
        """Yield the predictions as JSON, several lines at a time."""
        yield from ("\n".join(map(json_line, rows)) for rows in self.rows)


def predict_file(
    model: TrainedModel, file: Path, output: Path | None = None, *, skip_bad_rows: bool = False
) -> FilePredictions:
    """Predict the texts of `file`, into `output` if it is given.

    Raises DataError for an unreadable row without `skip_bad_rows`, InputError if `output` cannot be written.
    """
    if output is not None:
        check_output(output)
    examples, bad = read_examples(file, model)
    if bad and not (skip_bad_rows and examples):
        num = "1 row" if len(bad) == 1 else f"{len(bad):,} rows"
        hint = " or --skip-bad-rows" if examples else ""
        raise DataError(f"{num} of {file} cannot be read; mend{hint}:{listed(bad)}")
    if bad:
        _logger.info("%d of %d rows are left out:%s", len(bad), len(bad) + len(examples), listed(bad))
    if model.device.type == "cpu":
        limit_threads(probe_device("cpu"))
        disable_malloc_trim()
    rows = _predicted(model, examples)
    if output is not None:
        with predictions_file(output, model.tasks) as write:
            for chunk in rows:
                write(chunk)
        _logger.info("%d predictions are in %s.", len(examples), output)
    return FilePredictions(len(examples), [": ".join(one) for one in bad], rows, output)


def _predicted(model: TrainedModel, examples: list[Example]) -> Iterator[list[Row]]:
    remaining = iter(examples)
    for chunk in model.predict_examples(examples, on_progress=_progress(len(examples))):
        yield [predicted_row(next(remaining), prediction) for prediction in chunk]


def _progress(total: int) -> Callable[[float], None]:
    """Log the progress about every ten seconds."""
    _logger.info("predicting %d texts", total)
    last = time.monotonic()

    def log(done: float) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= LOG_SECONDS:
            last = now
            _logger.info("predicted %d of %d texts", done, total)

    return log
