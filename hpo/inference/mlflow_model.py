"""A trained model for MLflow, whose server answers over HTTP: `mlflow models serve -m DIR`."""

from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pandas as pd

from hpo.inference.model import load


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> SimpleNamespace:
    """Load an export with these options of `hpo.load`. MLflow calls this function by its name.

    `predict` takes a table as `hpo.load` does. Returns {task: fields of `TaskPrediction`} for each row.
    """
    model = load(path, **model_config)

    def predict(table: pd.DataFrame) -> list[dict[str, Any]]:
        return [{task: asdict(one) for task, one in each.items()} for each in model.predict(table)]

    return SimpleNamespace(predict=predict)
