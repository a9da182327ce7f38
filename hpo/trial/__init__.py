"""One trial, from its configuration to its outcome.

A study's own code calls this package as a decorator: `@hpo.trial` (`hpo.extensions.trial`).
"""

import sys
from types import ModuleType
from typing import Any

from hpo.extensions import trial


class _Decorator(ModuleType):
    def __call__(self, train: Any) -> Any:
        return trial(train)


sys.modules[__name__].__class__ = _Decorator
