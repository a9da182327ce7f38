"""The folders and buckets that a study of the database may name on this machine.

Anybody who can write to the database decides which places a study names. So a place must lie under the
working folder or under a folder or bucket of `HPO_ALLOW`, unless the user's study file names it too.
"""

from __future__ import annotations

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
"""Environment variable: folders and such as `s3://BUCKET/PREFIX`, with `:` between them."""
DATA_DIR = "HPO_DATA_DIR"
"""Environment variable: the folder with this machine's data, for studies whose paths do not lead to them."""


def places(config: StudyConfig) -> dict[str, str]:
    data = config.data
    named = {"data.path": data.path, **{f"data.files.{split}": path for split, path in data.files}}
    if isinstance(data.tasks, Path):
        named["data.tasks"] = data.tasks
    if data.hub is not None and Path(data.hub.name).is_dir():
        named["data.hub.name"] = Path(data.hub.name)
    named |= {
        f"data.options.{key}": Path(value)
        for key, value in data.options.items()
        if isinstance(value, (str, Path)) and os.sep in str(value)
    }
    if config.has_own_loop:
        named |= {key: Path(value) for key, value in _own_values(config) if _is_there(value)}
    for number, encoder in enumerate(() if config.has_own_loop else encoders_of(config)):
        name = encoder if isinstance(encoder, str) else str(encoder.get("tokenizer", ""))
        if name and Path(name).is_dir():
            named["model.encoder" if number == 0 else f"search_space.encoder.choices.{number - 1}"] = Path(
                name
            )
    return checkpoint_place(config.checkpoint) | {key: str(path) for key, path in named.items() if path}


def _own_values(config: StudyConfig) -> Iterator[tuple[str, Any]]:
    """The values of a study whose own code trains: fixed ones, and the choices of searched ones."""
    for name, value in config.training.option.items():
        yield f"training.{name}", value
    for name, one in config.search_space.items():
        for number, choice in enumerate(getattr(one, "choices", ())):
            yield f"search_space.{name}.choices.{number}", choice


def _is_there(value: Any) -> bool:
    """Return whether a value is the path of something on this machine."""
    return isinstance(value, str) and os.sep in value and Path(value).exists()


def checkpoint_place(config: CheckpointConfig) -> dict[str, str]:
    return {"checkpoint.location": config.location} if config.location else {}


def check_allowed(study: str, named: Mapping[str, str], of_file: Mapping[str, str] = {}) -> None:
    """Raise InputError where a study of the database names a place that this machine does not allow.

    Args:
        named: the study's `places`. Data that are not at their path need no leave: they are looked for in
            HPO_DATA_DIR alone.
        of_file: those that the user's own study file names.
    """
    allowed = [".", "runs", *_named_here(), *of_file.values()]  # runs/ may be a link to a larger disk
    for key, place in named.items():
        is_data = key.startswith("data.")
        if is_data and not Path(place).exists():
            continue
        roots = [*allowed, os.environ[DATA_DIR]] if is_data and os.environ.get(DATA_DIR) else allowed
        if not any(_resolved(place).is_relative_to(_resolved(root)) for root in roots):
            raise InputError(
                f"{key}: the study `{study}` of the database names {show(place, 200)}, which whoever can "
                f"write to the database can change. It must lie in the working folder or under what {ALLOW} "
                f"names. If it is right, set that environment variable to it (several with `{os.pathsep}` "
                "between them), or give the path of the study's file in place of its name."
            )


def allowing(config: StudyConfig) -> str:
    """The value of `HPO_ALLOW` with which another process may do what this one may with the study."""
    return os.pathsep.join(dict.fromkeys([*_named_here(), *places(config).values()]))


def _named_here() -> list[str]:
    given = re.split(rf"{re.escape(os.pathsep)}(?!//)", os.environ.get(ALLOW, ""))
    return [place for place in given if place]


def _resolved(place: str) -> Path:
    """Without `..` and links; a bucket is a relative path, and so under no folder."""
    if "://" in place:
        return Path(os.path.normpath(place))
    return Path(os.path.realpath(place))
