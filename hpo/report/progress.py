"""The running trials of a study: in place on a terminal, and as lines of a log elsewhere.

Workers write their progress into the database with their heartbeats, so no training step draws or waits.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from optuna.trial import FrozenTrial
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpo.config.study_config import StudyConfig
from hpo.device_time import MIN_SECONDS, REMEDY, DeviceTime, busy_text
from hpo.errors import HpoError
from hpo.outcome import Outcome, Progress
from hpo.report.formats import describe_params, format_metric, format_percent, plural
from hpo.report.status import study_status
from hpo.report.terminal import OUTCOME_STYLES, live_on
from hpo.study.reading.watch import StudyProgress, outcome_of
from hpo.study.sampling.promotion import last_rung

_LINE_SECONDS = 30.0  # time between two lines of a running trial in a log
_WIDE = 64  # columns for a trial's facts beside its bar; in fewer, they have their own line


class StudyDisplay:
    """Shows running trials, and prints a line for each end. `read` reads their study, if they have one."""

    def __init__(
        self,
        config: StudyConfig,
        read: Callable[[], Any] | None = None,
        console: Console | None = None,
        other_workers: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._console = console or Console(highlight=False)
        self._printed_at, self._objectives = time.monotonic(), config.objective
        self._total = "" if config.budget else f"/{config.num_trials}"
        self.live = live_on(self._console, transient=True)  # to be entered while trials are shown
        self._read, self._end, self._end_due = read, "", 0.0
        self._machine, self._was_busy = DeviceTime(None, other_workers), False
        self._machine_due = time.monotonic() + MIN_SECONDS

    def show(self, look: StudyProgress) -> None:
        """Print the due lines. `look` is the present state of the study."""
        self._show_machine()
        for trial in look.ended:
            outcome = outcome_of(trial)
            values, paused = trial.values if outcome == Outcome.COMPLETE else (), ""
            if outcome == Outcome.PAUSED:
                rung, reached = last_rung(trial.user_attrs)
                values, paused = reached["values"], f"at {format_percent(rung)} of its training"
            is_best = look.best is not None and look.best[1] == trial.number
            self._print_line(
                trial,
                (f"{outcome:<12}", OUTCOME_STYLES.get(outcome, "")),
                paused,
                (self.values(values), "bold"),
                describe_params(trial.params),
                (trial.user_attrs.get("outcome_reason", ""), "dim"),
                (f"{look.num_done}{self._total} trials", "dim"),
                (f"best {self._objectives[0].metric} so far" if is_best else "", "bold"),
            )
        if isinstance(self.live, Live):
            self.live.update(Group(*self._screen(look)), refresh=True)
            self._console.show_cursor(True)  # also after a kill
        elif time.monotonic() - self._printed_at >= _LINE_SECONDS:
            self._printed_at = time.monotonic()
            for running, progress in look.running:
                self._print_line(running, _part(progress), *self._facts(progress))

    def _show_machine(self) -> None:
        """Print a line when other programs begin or cease to take CPUs from this process and its workers."""
        if (now := time.monotonic()) < self._machine_due:
            return
        self._machine_due, self._machine.totals = now + _LINE_SECONDS, {}
        self._machine.measure()
        if (facts := self._machine.facts()) and facts["busy"] != self._was_busy:
            self._was_busy, text = facts["busy"], busy_text(facts)
            line = f"This machine is {text}. {REMEDY}" if text else "This machine is no longer busy."
            self._console.print(Text(line), soft_wrap=not self._console.is_terminal)

    def values(self, values: Sequence[float]) -> str:
        pairs = zip(self._objectives, values, strict=False)
        return ", ".join(f"{one.metric} {format_metric(one.metric, value)}" for one, value in pairs)

    def _print_line(self, trial: FrozenTrial | None, *parts: str | tuple[str, str]) -> None:
        texts = [Text(*part) if isinstance(part, tuple) else Text(part) for part in parts]
        line = Text("  ").join([Text(_name(trial)), *filter(None, texts)])
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def _screen(self, look: StudyProgress) -> Iterator[RenderableType]:
        if self._read is not None:
            best = [f"best {self.values(look.best[:1])} (trial {look.best[1]})"] if look.best else []
            yield _line(f"{look.num_done}{self._total} trials ended", self._estimated_end(), *best)
        width, is_wide = self._console.width, self._console.width >= _WIDE
        for trial, progress in look.running:
            finished, style, facts = progress.budget_used, "green", self._facts(progress)
            if progress.part == "evaluation":
                finished, style, num = progress.part_done, "cyan", progress.num_windows
                noun = "rows" if num == progress.num_texts else "windows"
                facts = [f"{finished * num:,.0f}/{num:,} {noun}", *facts]
            size = max(5, min(30, width - 70)) if is_wide else width - 24
            bar = ProgressBar(1.0, finished, size, complete_style=style, finished_style=style)
            yield (grid := Table.grid(padding=(0, 1, 0, 0)))
            name, part = _line(f"{_name(trial):9}"), Text(f"{progress.part:10}", style)
            grid.add_row(name, part, bar, _line(*facts) if is_wide else None)
            yield from [] if is_wide else [_line("", *facts)]

    def _estimated_end(self) -> str:
        now = time.monotonic()
        if self._read is not None and now >= self._end_due:
            with suppress(HpoError):  # the database is away
                end = study_status(self._read())["estimated_end"]
                local = datetime.fromisoformat(end).astimezone() if end else None
                self._end = f"ends about {local:%a %H:%M}" if local else ""
            self._end_due = now + max(5.0, 100 * (time.monotonic() - now))  # at most 1 % of the time
        return self._end

    def _facts(self, progress: Progress) -> list[str]:
        best = None if progress.best is None else format_metric(self._objectives[0].metric, progress.best)
        rate, loss = progress.examples_per_second, progress.train_loss
        known = {"{:.3g} ex/s": rate, "loss {:.3g}": loss, "best {}": best}
        of = f"/{progress.num_steps:,}" if progress.num_steps else f", {progress.budget_used:.0%}"
        facts = [text.format(value) for text, value in known.items() if value is not None]
        return [f"step {progress.step:,}{of}", *facts] if progress.step else facts


def _name(trial: FrozenTrial | None) -> str:
    return "trial" if trial is None else f"trial {trial.number:>3}"


def _line(*facts: str) -> Text:
    return Text("  ".join(facts), no_wrap=True, overflow="ellipsis")


def _part(progress: Progress) -> str:
    if progress.part != "evaluation":
        return f"{progress.budget_used:4.0%}" if progress.part == "training" else progress.part
    texts, windows = plural(progress.num_texts, "text"), plural(progress.num_windows, "window")
    return f"evaluating {texts} ({windows}), {100 * progress.part_done:.0f} %"
