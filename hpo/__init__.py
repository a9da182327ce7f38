"""Hyperparameter search for multitask transformers, with numeric precision as a searched dimension."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpo.api.study import Study as Study
    from hpo.config.data_config import StudyPath as StudyPath
    from hpo.evaluation.predictions import compare_predictions as compare_predictions
    from hpo.extensions import callback as callback
    from hpo.extensions import encoder as encoder
    from hpo.extensions import head as head
    from hpo.extensions import loss as loss
    from hpo.extensions import metric as metric
    from hpo.extensions import optimizer as optimizer
    from hpo.extensions import pooling as pooling
    from hpo.extensions import pruner as pruner
    from hpo.extensions import sampler as sampler
    from hpo.extensions import schedule as schedule
    from hpo.extensions import source as source
    from hpo.inference.model import load as load
    from hpo.section import Section as Section
    from hpo.tasks.kind import register
    from hpo.trial.check_precision import check_precision as check_precision

    kind = register

__version__ = "0.2.0"

_OBJECTS = {
    "Study": "hpo.api.study.Study",
    "load": "hpo.inference.model.load",
    "compare_predictions": "hpo.evaluation.predictions.compare_predictions",
    "check_precision": "hpo.trial.check_precision.check_precision",
    "kind": "hpo.tasks.kind.register",
    "Section": "hpo.section.Section",
    "StudyPath": "hpo.config.data_config.StudyPath",
} | {
    name: f"hpo.extensions.{name}"
    for name in (
        *("callback", "encoder", "head", "loss", "metric", "optimizer", "pooling", "pruner", "sampler"),
        *("schedule", "source"),
    )
}


def __getattr__(name: str) -> Any:
    """Import an object at its first use: most need PyTorch, and `hpo --help` does not."""
    if name == "trial":  # a package that is called
        return import_module("hpo.trial")
    if name in _OBJECTS:
        module, _, attribute = _OBJECTS[name].rpartition(".")
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
