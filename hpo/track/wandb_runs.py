"""Runs of Weights & Biases: a project of the study's name, in which a run's id is the key of its trial, or of
the study. The run of the study has the report as an artifact.

`WANDB_MODE=offline` keeps them in files, for `wandb sync` to send later. A server goes on with the run of
that id and takes no step twice; the files of a trial are written anew where they are not as it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import wandb

from hpo.errors import TrackerError, shorten
from hpo.redaction import without_secrets
from hpo.track.run_folders import is_noted, note
from hpo.track.runs import FACTS, Run, fact_names

INIT_SECONDS = 30.0
"""How long W&B may take until it has a run."""


class WandbTracker:
    """Keeps its files in `folder`, or in WANDB_DIR."""

    def __init__(self, study: str, folder: Path) -> None:
        self._project = os.environ.get("WANDB_PROJECT") or study
        self._folder = Path(os.environ.get("WANDB_DIR") or folder)
        self._open: dict[str, Any] = {}
        """By the keys of runs that go on."""
        self._ended: dict[str, tuple[Path, Run]] = {}
        """By their keys, what folders hold once W&B's own process has written them."""

    @property
    def where(self) -> str:
        return f"W&B, project {self._project}, files in {self._folder / 'wandb'}"

    def show(self, run: Run, write_files: Callable[[Path], None] | None = None, /) -> bool:
        with _asking():
            if run.key not in self._open:
                before = list(self._folder.glob(f"wandb/*run-*-{run.key}"))
                if any(is_noted(folder, run) for folder in before):
                    return False
                self._open[run.key] = self._begin(run, before)
            opened = self._open[run.key]
            for point in run.points:
                if point.step >= opened.step:
                    opened.log({**point.metrics, "_timestamp": point.time}, step=point.step, commit=True)
            # W&B deletes no name of a config: a fact that is no longer true becomes empty.
            gone = fact_names(opened.config.get(FACTS)) & {*opened.config.keys()}
            settings = {**dict.fromkeys(gone, ""), **run.params, **run.facts, FACTS: ",".join(run.facts)}
            opened.config.update(settings, allow_val_change=True)
            if write_files:
                self._log_files(opened, run, write_files)
            if run.status != "running":
                opened.summary.update(run.results)
                self._end(run.key, has_ended=run.status != "waiting", failed=run.status == "failed")
                self._ended[run.key] = Path(opened.dir).parent, run
            return True

    def close(self) -> None:
        try:
            with _asking():
                for key in list(self._open):
                    self._end(key, has_ended=False, failed=False)
        finally:
            wandb.teardown()  # ends W&B's process, without which a file may not be whole yet
            for folder, run in self._ended.values():
                if folder.is_dir():  # else somebody has removed it
                    note(folder, run)

    def _begin(self, run: Run, before: list[Path]) -> Any:
        self._folder.mkdir(parents=True, exist_ok=True)
        options = {"console": "off", "silent": True, "init_timeout": INIT_SECONDS, "disable_git": True}
        options |= {"x_disable_stats": True, "x_disable_meta": True, "disable_code": True}
        if wandb.setup().settings.run_mode == "offline-run":
            # Before the new one is there: its folder is named by the second, and may be one of these.
            for path in before:
                shutil.rmtree(path)
            self._ended.pop(run.key, None)
        return wandb.init(
            project=self._project,
            id=run.key,
            name=run.name,
            group=(run.study or run).name,
            job_type="trial" if run.study else "study",
            dir=self._folder.absolute(),  # W&B has a process, whose directory may be another
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**options),
        )

    def _log_files(self, opened: Any, run: Run, write_files: Callable[[Path], None]) -> None:
        artifact = wandb.Artifact(f"report-{run.key}", type="report")
        with TemporaryDirectory() as folder:
            write_files(Path(folder))
            artifact.add_dir(folder)  # which copies the files
        opened.log_artifact(artifact)

    def _end(self, key: str, *, has_ended: bool, failed: bool) -> None:
        opened = self._open.pop(key)
        if not has_ended:
            opened.mark_preempting()
        opened.finish(exit_code=int(failed or not has_ended))


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except wandb.errors.Error as error:
        told = shorten(without_secrets(str(error)), 300)
        hint = "Log in (`wandb login`), or set WANDB_MODE=offline and `wandb sync` later"
        raise TrackerError(f"W&B does not take the runs. {hint}. ({told})") from error
