"""A trained model for MLflow: `mlflow models serve -m DIR` answers over HTTP, without a server of our own.

MLflow loads this module by its name in the file MLmodel of an export, and calls `_load_pyfunc`.
"""

from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pandas as pd

from hpo.inference.model import load


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> SimpleNamespace:
    """Load an export with these options of `hpo.load`.

    Its `predict` takes a table with the column `text` and returns {task: fields of `TaskPrediction`} per row.
    """
    model = load(path, **model_config)

    def predict(table: pd.DataFrame) -> list[dict[str, Any]]:
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        return [{task: asdict(one) for task, one in each.items()} for each in model.predict(rows)]

    return SimpleNamespace(predict=predict)
