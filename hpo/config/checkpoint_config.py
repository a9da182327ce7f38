"""What is kept of a trial, and where: the section `checkpoint` of a study file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

from hpo.config.study_file import show
from hpo.config.trial_settings import Positive
from hpo.section import Section, Whole

BUCKETS = ("s3://", "gs://")
"""The beginnings of a `checkpoint.location` to which checkpoints are uploaded."""


def _checkpoint_location(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(
            f"must be a folder, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`, but got {show(value)}."
        )
    if value.startswith("artifacts:"):
        raise ValueError(
            f"must be a folder that the workers share, or `s3://BUCKET/PREFIX`, but got {show(value)}. "
            "`artifacts:` was removed."
        )
    if re.match(r"\w+://", value):
        if not re.fullmatch(r"(s3|gs)://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[\w.-]+)*/?", value):
            raise ValueError(
                "must be `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX` in letters, digits, `.`, `_` and `-`, "
                f"but got {show(value)}. The server and its keys come from environment variables "
                "(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ..., GOOGLE_APPLICATION_CREDENTIALS)."
            )
        return value
    folder = (info.context or {}).get("folder", Path())
    return str(Path(folder, Path(value).expanduser()).absolute())


NOT_SHARED = (
    "The study names no `checkpoint.location`, so each machine keeps its own checkpoints, and a trial "
    "continues only on the machine that has its checkpoint. For workers on several machines, name a "
    "folder or a bucket that all of them reach."
)


class CheckpointConfig(Section):
    """What is kept of a trial, and where."""

    location: Annotated[str, BeforeValidator(_checkpoint_location)] | None = None
    """Where checkpoints are kept, so that any worker that reads them goes on with a trial. Left out: under
    `runs/`. A folder that the workers share; or a bucket to which they upload: `s3://BUCKET/PREFIX` on S3 or
    a server with its protocol (extra `s3`), `gs://BUCKET/PREFIX` on Google Cloud Storage (package gcsfs). The
    server and its keys come from AWS's or Google's environment variables."""
    top_k: Annotated[Whole, Field(ge=0)] = 3
    """Best trials of a study that keep their weights; unless 0, the last two that were not finite keep theirs
    too, for `hpo diagnose`."""
    every_seconds: Positive = 30.0
    """Seconds between checkpoints of a running trial."""

    @property
    def is_remote(self) -> bool:
        """Whether checkpoints are uploaded from `runs/`."""
        return self.location is not None and self.location.startswith(BUCKETS)

    def folder_of(self, study: str, token: str, runs_dir: Path) -> Path:
        """Where the trials of a study have their checkpoints; the token tells it from others of its name."""
        base = runs_dir if self.location is None or self.is_remote else Path(self.location)
        return base / study / f"checkpoints-{token[:8]}"
