"""The tests run alike, however they were started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from hpo.study.running.stopping import STOP_SIGNALS


def test_no_signal_is_ignored() -> None:
    assert [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_IGN] == []


def test_no_signal_is_ignored_after_a_shell_ignored_it() -> None:
    """As with `nohup make test &`."""
    ignoring = ["sh", "-c", "trap '' INT TERM USR1 USR2; exec \"$@\"", "sh"]
    test = f"{__file__}::{test_no_signal_is_ignored.__name__}"
    finished = subprocess.run(
        [*ignoring, sys.executable, "-m", "pytest", test, "-p", "no:cacheprovider"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout
