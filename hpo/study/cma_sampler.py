"""Optuna's CMA-ES without the code that a database could make it run.

Optuna keeps the state of the search pickled in an attribute of a trial, and unpickling calls whatever the
pickle names. Here it may name what the optimizers of `cmaes` are made of: themselves, and NumPy's arrays.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Sequence
from typing import Any

import cmaes
from optuna import samplers
from optuna.trial import FrozenTrial

_logger = logging.getLogger(__name__)

_OPTIMIZERS = (cmaes.CMA, cmaes.SepCMA, cmaes.CMAwM)
_ADMITTED = {(found.__module__, found.__qualname__) for found in _OPTIMIZERS} | {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *(
        (module, name)
        for module in ("numpy._core.multiarray", "numpy.core.multiarray")
        for name in ("_reconstruct", "scalar")
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an optimizer")
        return super().find_class(module, name)


class CmaEsSampler(samplers.CmaEsSampler):
    """Begins the search anew where its stored state cannot be read, or is more than that."""

    def _restore_optimizer(self, completed_trials: Sequence[FrozenTrial]) -> Any:
        for trial in reversed(completed_trials):
            attributes = {
                key: value
                for key, value in trial.system_attrs.items()
                if key.startswith(self._attr_key_optimizer)
            }
            if attributes:
                try:
                    state = bytes.fromhex(self._concat_optimizer_attrs(attributes))
                    optimizer = _Unpickler(io.BytesIO(state)).load()
                    if isinstance(optimizer, _OPTIMIZERS):
                        return optimizer
                    problem = f"a {type(optimizer).__name__}"
                except Exception as error:  # a damaged pickle may raise any
                    problem = str(error)
                _logger.warning(
                    "CMA-ES begins anew: its state in trial %d cannot be used: %s", trial.number, problem
                )
                return None
        return None
