"""Folders and buckets that a study of the database may use on this machine.

Anybody who can write to the database controls the paths of its studies. So a path must lie in the working
folder or in a folder or bucket of `HPO_ALLOW`, unless the user's study file names it too.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo.config.sections import CheckpointConfig
from hpo.config.study_config import StudyConfig
from hpo.config.study_file import show
from hpo.config.trial_config import encoders_of
from hpo.errors import InputError

ALLOW = "HPO_ALLOW"
"""Environment variable: folders and buckets such as `s3://BUCKET/PREFIX`, separated by `:`."""
DATA_DIR = "HPO_DATA_DIR"
"""Environment variable: this machine's folder of data, if a study's own paths do not exist here."""


def paths_of(config: StudyConfig) -> dict[str, str]:
    """Return the paths that the study names, by key."""
    data = config.data
    named = {"data.path": data.path, **{f"data.files.{split}": path for split, path in data.files}}
    named["data.tasks"] = data.tasks if isinstance(data.tasks, Path) else None
    possible = {f"data.options.{key}": value for key, value in data.options.items() if os.sep in str(value)}
    named |= {key: Path(value) for key, value in possible.items() if isinstance(value, (str, Path))}
    if data.hub is not None and Path(data.hub.name).is_dir():
        named["data.hub.name"] = Path(data.hub.name)
    if config.has_own_loop:
        named |= dict(_existing_values(config))
    for number, encoder in enumerate(() if config.has_own_loop else encoders_of(config)):
        name = encoder if isinstance(encoder, str) else str(encoder.get("tokenizer", ""))
        if name and Path(name).is_dir():
            key = "model.encoder" if number == 0 else f"search_space.encoder.choices.{number - 1}"
            named[key] = Path(name)
    return checkpoint_path(config.checkpoint) | {key: str(path) for key, path in named.items() if path}


def _existing_values(config: StudyConfig) -> Iterator[tuple[str, Path]]:
    """Yield the settings of a study's own training loop that are existing paths."""
    values: dict[str, Any] = {f"training.{name}": value for name, value in config.training.option.items()}
    for name, one in config.search_space.items():
        choices = enumerate(getattr(one, "choices", ()))
        values |= {f"search_space.{name}.choices.{number}": choice for number, choice in choices}
    for key, value in values.items():
        if isinstance(value, str) and os.sep in value and Path(value).exists():
            yield key, Path(value)


def checkpoint_path(config: CheckpointConfig) -> dict[str, str]:
    return {"checkpoint.location": config.location} if config.location else {}


def check_allowed(study: str, named: Mapping[str, str], of_file: Mapping[str, str] = {}) -> None:
    """Raise InputError if a study of the database names a path that this machine does not allow.

    Args:
        named: `paths_of` the study. Missing data are looked up in HPO_DATA_DIR alone, and need no permission.
        of_file: `paths_of` the user's own study file.
    """
    allowed = [".", "runs", *_allowed_here(), *of_file.values()]  # runs/ may be a link to a larger disk
    for key, path in named.items():
        is_data = key.startswith("data.")
        if is_data and not Path(path).exists():
            continue
        roots = [*allowed, os.environ[DATA_DIR]] if is_data and os.environ.get(DATA_DIR) else allowed
        if not any(_resolved(path).is_relative_to(_resolved(root)) for root in roots):
            raise InputError(
                f"{key}: the study `{study}` of the database names {show(path, 200)}, but anybody who can "
                f"write to the database can change this. It must lie in the working folder or in a folder of "
                f"{ALLOW}. If it is right, add it to this environment variable (several with `{os.pathsep}` "
                "between them), or give the path of the study's file in place of its name."
            )


def allowing(config: StudyConfig) -> str:
    """Return the value of `HPO_ALLOW` with which another process may use the paths of the study."""
    return os.pathsep.join(dict.fromkeys([*_allowed_here(), *paths_of(config).values()]))


def _allowed_here() -> list[str]:
    given = re.split(rf"{re.escape(os.pathsep)}(?!//)", os.environ.get(ALLOW, ""))
    return [path for path in given if path]


def _resolved(path: str) -> Path:
    """Resolve `..` and links. A bucket becomes a relative path, and so lies in no folder."""
    if "://" in path:
        return Path(os.path.normpath(path))
    return Path(os.path.realpath(path))
