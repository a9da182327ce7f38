"""Runs of Weights & Biases in a project named like the study; a run's id is its key.

The run of the study has the report as an artifact. With `WANDB_MODE=offline` runs are files, for `wandb sync`
to send later. A server continues the run of an id and ignores a repeated step; the files of an outdated run
are written anew.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpo.errors import TrackerError, shorten
from hpo.redaction import without_secrets
from hpo.track.runs import Run, is_noted, note

INIT_SECONDS = 30.0  # time limit of W&B to open a run


class WandbTracker:
    """Writes its files into `folder`, or into WANDB_DIR."""

    def __init__(self, study: str, folder: Path) -> None:
        import wandb

        self._wandb: Any = wandb
        self._project = os.environ.get("WANDB_PROJECT") or study
        self._folder = Path(os.environ.get("WANDB_DIR") or folder)
        self._open: dict[str, Any] = {}  # running trials, by key
        self._ended: dict[str, tuple[Path, Run]] = {}
        """Folders of ended runs, by key; complete after the end of W&B's own process."""

    @property
    def where(self) -> str:
        return f"W&B, project {self._project}, files in {self._folder / 'wandb'}"

    def show(self, run: Run, write_files: Callable[[Path], None] | None = None, /) -> bool:
        with self._errors_explained():
            if run.key not in self._open:
                before = list(self._folder.glob(f"wandb/*run-*-{run.key}"))
                if any(is_noted(folder, run) for folder in before):
                    return False
                self._open[run.key] = self._begin(run, before)
            opened = self._open[run.key]
            for point in run.points:
                if point.step >= opened.step:
                    opened.log({**point.metrics, "_timestamp": point.time}, step=point.step, commit=True)
            opened.config.update({**run.params, **run.facts}, allow_val_change=True)
            if write_files:
                self._log_files(opened, run, write_files)
            if run.status != "running":
                opened.summary.update(run.results)
                self._end(run.key, has_ended=run.status != "waiting", failed=run.status == "failed")
                self._ended[run.key] = Path(opened.dir).parent, run
            return True

    def close(self) -> None:
        try:
            with self._errors_explained():
                for key in list(self._open):
                    self._end(key, has_ended=False, failed=False)
        finally:
            self._wandb.teardown()  # waits for W&B's process, which writes the files
            for folder, run in self._ended.values():
                if folder.is_dir():  # else somebody has removed it
                    note(folder, run)

    def _begin(self, run: Run, before: list[Path]) -> Any:
        self._folder.mkdir(parents=True, exist_ok=True)
        options = {"console": "off", "silent": True, "init_timeout": INIT_SECONDS, "disable_git": True}
        options |= {"x_disable_stats": True, "x_disable_meta": True, "disable_code": True}
        if self._wandb.setup().settings.run_mode == "offline-run":
            # Remove the old folders first: the new one is named by the second and may be one of them.
            for path in before:
                shutil.rmtree(path)
            self._ended.pop(run.key, None)
        return self._wandb.init(
            project=self._project,
            id=run.key,
            name=run.name,
            group=(run.study or run).name,
            job_type="trial" if run.study else "study",
            dir=self._folder.absolute(),  # W&B's process may have another working folder
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(**options),
        )

    def _log_files(self, opened: Any, run: Run, write_files: Callable[[Path], None]) -> None:
        artifact = self._wandb.Artifact(f"report-{run.key}", type="report")
        with TemporaryDirectory() as folder:
            write_files(Path(folder))
            artifact.add_dir(folder)  # copies the files
        opened.log_artifact(artifact)

    def _end(self, key: str, *, has_ended: bool, failed: bool) -> None:
        opened = self._open.pop(key)
        if not has_ended:
            opened.mark_preempting()
        opened.finish(exit_code=int(failed or not has_ended))

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except self._wandb.errors.Error as error:
            message = shorten(without_secrets(str(error)), 300)
            hint = "Log in (`wandb login`), or set WANDB_MODE=offline and `wandb sync` later"
            raise TrackerError(f"W&B does not take the runs. {hint}. ({message})") from error
