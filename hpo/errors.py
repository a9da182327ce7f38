"""All errors of `hpo`, and the exit code of each.

A message has the requirement, the value received and the remedy. Bad input ends a command with exit code 2, a
failed run with 1, both without a traceback.

    HpoError
    ├── InputError                 the user's input is wrong (exit code 2)
    │   ├── StudyFileError         the study file: syntax, an unknown key, a value out of range
    │   │   └── NoStudyFileError   there is no study file of this name
    │   ├── DataError              the data set: broken rows, unknown classes, an empty split
    │   ├── ModelError             the encoder: no such folder, no weights, hub out of reach
    │   │   └── BrokenEncoderError NaN weights or a token without an embedding, under all settings
    │   ├── CodeError              the study's own code: an exception, a wrong result, wrong arguments
    │   ├── StorageError           the database: no such host, wrong password, no rights, read-only
    │   │   ├── NoDatabaseError    there is no database at this URL yet
    │   │   └── NoStudyError       the database has no study of this name
    │   └── StudyChangedError      the stored study has another search space than the study file
    ├── RunError                   the run cannot continue (exit code 1)
    │   ├── CheckpointError        a checkpoint could not be written or no intact one could be read
    │   ├── DeviceLostError        this process can no longer use its GPU; a new process may
    │   ├── LeaseLostError         another worker has the lease of this trial; this one must stop
    │   ├── TrackerError           MLflow or W&B is away, or refuses its data
    │   └── OutageError            the database does not answer: a restart, a lost connection, a long lock
    │       └── StoppedError       a stop request during an outage (exit code 130)
    └── TrialEnd                   a trial ends early with a known outcome; never reaches the user
        ├── Unsupported            this device cannot run the requested precision
        ├── Failed                 the same, in a study with `amp.on_unsupported: fail`
        ├── Incompatible           the model works in fp32, but not under the precision
        ├── Invalid                a fault of the model, the data or a metric
        ├── Nonfinite              loss, gradients or logits stay NaN or infinite
        ├── OutOfMemory            one example does not fit
        ├── Pruned                 stopped by the pruner or a broken limit
        ├── Paused                 the trial waits at a rung, and continues if it is among the best
        └── Preempted              a stop request; the checkpoint is written
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import ClassVar

from hpo.outcome import Outcome


class HpoError(Exception):
    exit_code: ClassVar[int] = 1


class InputError(HpoError):
    exit_code = 2


class StudyFileError(InputError): ...


class NoStudyFileError(StudyFileError): ...


class DataError(InputError): ...


class ModelError(InputError): ...


class CodeError(InputError):
    """A fault of a study's own code. It ends a trial as `invalid`."""


class BrokenEncoderError(ModelError): ...


class StorageError(InputError): ...


class NoDatabaseError(StorageError): ...


class NoStudyError(StorageError): ...


class StudyChangedError(InputError): ...


class RunError(HpoError): ...


class CheckpointError(RunError): ...


class DeviceLostError(RunError): ...


class LeaseLostError(RunError): ...


class TrackerError(RunError): ...


class OutageError(RunError): ...


class StoppedError(OutageError):
    exit_code = 130


class TrialEnd(HpoError):
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
    """A repetition of the failed step in fp32 is finite. None: unknown."""


class OutOfMemory(TrialEnd):
    outcome = Outcome.OOM


class Pruned(TrialEnd):
    outcome = Outcome.PRUNED


class Paused(TrialEnd):
    outcome = Outcome.PAUSED


class Preempted(TrialEnd):
    outcome = Outcome.PREEMPTED


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return ` Did you mean ...?` with the nearest of `known`, or the list of them.

    Initials stand for a name: `lr` for `learning_rate` and `lora_rank`.
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
    """Return the text without control characters, because they could change a terminal."""
    unsafe = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
    return re.sub(unsafe, "\N{REPLACEMENT CHARACTER}", text)


def shorten(text: str, limit: int) -> str:
    """Return `text` on one line of at most `limit` characters, with ` ...` for the missing part."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 4].rstrip()} ..."


def first_names(names: Sequence[str], limit: int) -> str:
    """Return the first names and the number of the others, such as `a, b and 3 more`."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
