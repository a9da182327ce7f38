"""Event files of TensorBoard: one folder for each trial and one for the study.

Numbers are scalars. At the end of a run, its settings and facts are HPARAMS and a table under TEXT. A folder
that is written anew begins with `purge_step`, so that TensorBoard drops its earlier content.
"""

import html
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpo.track.runs import Run, forget_other_studies, is_noted, note


class TensorboardTracker:
    """Writes into `folder`; removes from it the trials of a deleted study of the same name."""

    def __init__(self, folder: Path, token: str) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._new_writer = SummaryWriter
        self._hparams: Any = hparams
        self._folder = folder
        self._open: dict[str, tuple[Any, int]] = {}
        """Writers of running trials by key, each with its number of written evaluations."""
        forget_other_studies(folder, token)

    @property
    def where(self) -> str:
        return f"{self._folder}: tensorboard --logdir {self._folder}"

    def show(self, run: Run, _: object = None, /) -> bool:
        folder = self._folder / (run.name.replace(" ", "-") if run.study else "study")
        if run.key not in self._open:
            if is_noted(folder, run):
                return False
            shutil.rmtree(folder, ignore_errors=True)
            self._open[run.key] = self._new_writer(str(folder), purge_step=0), 0
        writer, num_written = self._open[run.key]
        for point in run.points[num_written:]:
            for name, value in point.metrics.items():
                writer.add_scalar(name, value, point.step, point.time)
        self._open[run.key] = writer, len(run.points)
        if run.status == "running":
            writer.flush()
            return True
        del self._open[run.key]
        last = run.points[-1].step if run.points else 0
        for name, value in run.results.items():
            writer.add_scalar(name, value, last, run.ended)
        events: Any = writer.file_writer
        settings = {**run.params, **run.facts}
        for summary in self._hparams(settings, dict(run.results)):
            events.add_summary(summary)
        writer.add_text("settings", _table(settings), last, run.ended)
        writer.close()
        note(folder, run)
        return True

    def close(self) -> None:
        for writer, _ in self._open.values():
            writer.close()
        self._open.clear()


def _table(settings: Mapping[str, Any]) -> str:
    rows = (
        f"| {name} | {html.escape(str(value)).replace('|', '&#124;')} |" for name, value in settings.items()
    )
    return "\n".join(["| setting | value |", "| --- | --- |", *rows])
