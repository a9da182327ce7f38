"""Optuna's scripts of its tables, ten of them, are read once a process, not whenever a database is opened."""

from alembic.config import Config
from alembic.script import ScriptDirectory

_read = ScriptDirectory.from_config
_directories: dict[str | None, ScriptDirectory] = {}


def _from_config(config: Config) -> ScriptDirectory:
    place = config.get_main_option("script_location")
    if place not in _directories:
        _directories[place] = _read(config)
    return _directories[place]


ScriptDirectory.from_config = staticmethod(_from_config)
