"""A trained model for MLflow, whose server answers over HTTP: `mlflow models serve -m DIR`."""

from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pandas as pd

from hpo.inference.model import load


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> SimpleNamespace:
    """Load an export with these options of `hpo.load`. MLflow calls this function by its name.

    `predict` takes a table with a column `text`. Returns {task: fields of `TaskPrediction`} for each row.
    """
    model = load(path, **model_config)

    def predict(table: pd.DataFrame) -> list[dict[str, Any]]:
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        return [{task: asdict(one) for task, one in each.items()} for each in model.predict(rows)]

    return SimpleNamespace(predict=predict)
