import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import finish, hpo_command, ok, start_hpo
from support.worker_process import begin, result, study, worker_on

from hpo.report import screens
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

WATCH = ("status", "tiny", "--watch")


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """The default database of a folder, with a study of two trials that have not begun."""
    (tmp_path / "runs").mkdir()
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        create_or_resume_study(storage, study(2))
        yield storage


def test_a_pipe_shows_only_changes(tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []

    def sleep(interval: float) -> None:
        seconds.append(interval)
        if len(seconds) != 2:
            with worker_on(storage, study(2)) as worker:
                worker.record_outcome(begin(worker)[0], result("complete", values=(0.75,)))

    monkeypatch.setattr(screens, "sleep", sleep)
    watched = ok(hpo_command(tmp_path, *WATCH))
    headlines = [line for line in watched.out.splitlines() if line.startswith("tiny: ")]
    assert [line.split()[1] for line in headlines] == ["0", "1", "2"]
    assert seconds == [5, 5, 5]
    assert "\x1b" not in watched.out + watched.err
    assert watched.out.endswith(ok(hpo_command(tmp_path, "status", "tiny")).out)


@pytest.mark.usefixtures("storage")
def test_an_interrupt_ends_the_watch(tmp_path: Path) -> None:
    process = start_hpo(tmp_path, *WATCH)
    assert process.stdout.readline().startswith("tiny: 0 of 2 trials ended")
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert (ended.exit_code, ended.err) == (130, "")
