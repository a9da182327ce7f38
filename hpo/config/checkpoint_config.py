"""What is kept of a trial, and where: the section `checkpoint` of a study file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

from hpo.config.study_file import show
from hpo.config.trial_settings import Positive
from hpo.section import Section, Whole

ARTIFACTS, S3 = "artifacts:", "s3://"
"""What a `checkpoint.location` in an artifact store begins with."""


def _checkpoint_location(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"must be a folder, `{ARTIFACTS}FOLDER` or `{S3}BUCKET/PREFIX`, but got {show(value)}."
        )
    if re.match(r"\w+://", value):
        if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w.-]+)*/?", value):
            raise ValueError(
                f"must be `{S3}BUCKET/PREFIX` in letters, digits, `.`, `_` and `-`, but got {show(value)}. "
                "The server and its keys come from AWS's environment variables (AWS_ENDPOINT_URL, "
                "AWS_ACCESS_KEY_ID ...)."
            )
        return value
    scheme = ARTIFACTS if value.startswith(ARTIFACTS) else ""
    folder = (info.context or {}).get("folder", Path())
    return scheme + str(Path(folder, Path(value.removeprefix(scheme)).expanduser()).absolute())


class CheckpointConfig(Section):
    """What is kept of a trial, and where."""

    location: Annotated[str, BeforeValidator(_checkpoint_location)] | None = None
    """Where checkpoints are kept, so that any worker that reads them goes on with a trial. Left out: under
    `runs/`. A folder that the workers share; `artifacts:FOLDER`, an artifact store of Optuna's; or
    `s3://BUCKET/PREFIX`, one on S3 or what speaks its protocol (extra `s3`), with AWS's environment variables
    for the server and its keys."""
    top_k: Annotated[Whole, Field(ge=0)] = 3
    """Best trials of a study that keep their weights; unless 0, the last two that were not finite keep theirs
    too, for `hpo diagnose`."""
    every_seconds: Positive = 30.0
    """Seconds between checkpoints of a running trial."""

    def folder_of(self, study: str, token: str, runs_dir: Path) -> Path:
        """Where the trials of a study have their checkpoints; the token tells it from others of its name."""
        is_store = self.location is None or self.location.startswith((ARTIFACTS, S3))
        base = runs_dir if is_store else Path(str(self.location))
        return base / study / f"checkpoints-{token[:8]}"
