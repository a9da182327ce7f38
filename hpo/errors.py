"""All errors of `hpo`, and the exit code of each.

A message says what must hold, what came instead and what to do. Bad input ends a command with exit
code 2, a run that could not go on with 1; neither prints a traceback.

    HpoError
    ├── InputError                 the user's input is wrong (exit code 2)
    │   ├── StudyFileError         the study file: syntax, an unknown key, a value out of range
    │   │   └── NoStudyFileError   there is no study file of that name
    │   ├── DataError              the data set: broken rows, unknown classes, an empty split
    │   ├── ModelError             the encoder: no such folder, no weights, hub out of reach
    │   │   └── BrokenEncoderError no settings help: NaN among its weights, a token without an embedding
    │   ├── StorageError           the database: no such host, wrong password, no rights, read-only
    │   │   ├── NoDatabaseError    there is none yet at that place
    │   │   └── NoStudyError       the database has no study of that name
    │   └── StudyChangedError      the stored study has another search space than the study file
    ├── RunError                   the run cannot go on (exit code 1)
    │   ├── CheckpointError        a checkpoint could not be written or no intact one could be read
    │   ├── DeviceLostError        this process cannot use its GPU any more; a new process may
    │   ├── LeaseLostError         another worker took this trial over; this one must stop
    │   ├── TrackerError           MLflow or W&B is away, or refuses what it is sent
    │   └── OutageError            the database is away; it may be back soon
    │       └── StoppedError       told to stop while it is (exit code 130)
    └── TrialEnd                   a trial ends early with a known outcome; never reaches the user
        ├── Unsupported            this device cannot run the requested precision
        ├── Failed                 likewise, and the study wants such trials to fail
        ├── Incompatible           the model works in fp32, but not under the precision
        ├── Invalid                the model, the data or a metric is at fault
        ├── Nonfinite              loss, gradients or logits stay NaN or infinite
        ├── OutOfMemory            one example does not fit
        ├── Pruned                 the pruner stopped the trial, or a limit that it breaks
        ├── Paused                 the trial waits at a rung, and continues if it is among the best
        └── Preempted              told to stop; the checkpoint is written
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import ClassVar

from hpo.outcome import Outcome


class HpoError(Exception):
    """Base of every error raised on purpose."""

    exit_code: ClassVar[int] = 1


class InputError(HpoError):
    """What the user gave is wrong; the message names it and says what must hold."""

    exit_code = 2


class StudyFileError(InputError):
    """A study file cannot be used."""


class NoStudyFileError(StudyFileError):
    """There is no study file of the name that the user gave."""


class DataError(InputError):
    """A data set cannot be used."""


class ModelError(InputError):
    """An encoder cannot be loaded or does not fit the settings."""


class BrokenEncoderError(ModelError):
    """The weights or the tokenizer of an encoder are wrong, whatever the settings of a trial."""


class StorageError(InputError):
    """The database that the user named cannot be used."""


class NoDatabaseError(StorageError):
    """There is no study database yet at the place that the user named."""


class NoStudyError(StorageError):
    """The database has no study of the name that the user gave."""


class StudyChangedError(InputError):
    """The study in the database was made with another definition."""


class RunError(HpoError):
    """The run cannot go on, through no fault of the input."""


class CheckpointError(RunError):
    """A checkpoint could not be written, or no intact one could be read."""


class DeviceLostError(RunError):
    """The CUDA context of this process is lost. A new process may use the GPU; no trial is at fault."""


class LeaseLostError(RunError):
    """Another worker has taken over the trial that this worker was running."""


class TrackerError(RunError):
    """A tracker does not take what it is to show; the study is not concerned."""


class OutageError(RunError):
    """The database does not answer now: a restart, a lost connection, a long lock."""


class StoppedError(OutageError):
    """Told to stop while the database is away or locked, so that nothing could be stored."""

    exit_code = 130


class TrialEnd(HpoError):
    """A trial ends early for a known reason; the executor turns it into the trial's outcome."""

    outcome: ClassVar[Outcome]


class Unsupported(TrialEnd):
    outcome = Outcome.UNSUPPORTED


class Failed(TrialEnd):
    outcome = Outcome.FAILED


class Incompatible(TrialEnd):
    outcome = Outcome.INCOMPATIBLE


class Invalid(TrialEnd):
    outcome = Outcome.INVALID


class Nonfinite(TrialEnd):
    outcome = Outcome.NONFINITE
    finite_in_fp32: bool | None = None
    """Whether the step that broke is finite if it is repeated in fp32; None: unknown."""


class OutOfMemory(TrialEnd):
    outcome = Outcome.OOM


class Pruned(TrialEnd):
    outcome = Outcome.PRUNED


class Paused(TrialEnd):
    outcome = Outcome.PAUSED


class Preempted(TrialEnd):
    outcome = Outcome.PREEMPTED


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return ` Did you mean ...?` with the nearest of `known`, else the list of them; empty if none is known.

    The initials of a name stand for it: `lr` for `learning_rate`, and for `lora_rank`.
    """
    if not known:
        return ""
    in_lower_case = {full.lower(): full for full in known}
    near = [in_lower_case[key] for key in get_close_matches(name.lower(), in_lower_case, n=1, cutoff=0.6)]
    near = near or [full for full in known if len(name) > 1 and _initials(full) == name.lower()]
    return f" Did you mean `{'` or `'.join(near)}`?" if near else f" Known: {', '.join(known)}."


def _initials(name: str) -> str:
    return "".join(word[0] for word in re.split(r"[\W_]+", name.lower()) if word)


def printable(text: str) -> str:
    """Return the text without the control characters with which it could change a terminal."""
    unsafe = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
    return re.sub(unsafe, "\N{REPLACEMENT CHARACTER}", text)


def shorten(text: str, limit: int) -> str:
    """`text` on one line of at most `limit` characters, with ` ...` for what is left out."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 4].rstrip()} ..."
