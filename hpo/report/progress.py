"""Progress lines of a running study, for a terminal, a log file or a notebook."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial
from rich.console import Console
from rich.text import Text

from hpo.config.study_config import StudyConfig
from hpo.outcome import Outcome
from hpo.report.formats import describe_params, format_metric, format_percent
from hpo.report.terminal import OUTCOME_STYLES
from hpo.study.reading.watch import StudyProgress, outcome_of
from hpo.study.sampling.promotion import rungs_of

_LINE_SECONDS = 30.0


class StudyDisplay:
    """Prints a line for each ended trial, and every half minute one for each running trial."""

    def __init__(self, config: StudyConfig, *, console: Console | None = None) -> None:
        self._console = console or Console()
        self._objectives = config.objective
        self._total = "" if config.budget else f"/{config.num_trials}"
        self._printed_at = time.monotonic()

    def show(self, look: StudyProgress) -> None:
        """Print the due lines. `look` is the present state of the study."""
        for trial in look.ended:
            outcome = outcome_of(trial)
            values, paused = trial.values if outcome == Outcome.COMPLETE else (), ""
            if outcome == Outcome.PAUSED:
                rung, reached = [*rungs_of(trial.user_attrs).items()][-1]
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
        if time.monotonic() - self._printed_at < _LINE_SECONDS:
            return
        self._printed_at = time.monotonic()
        for trial, progress in look.running:
            self._print_line(trial, *self._facts(trial, progress))

    def _print_line(self, trial: FrozenTrial, *parts: str | tuple[str, str]) -> None:
        texts = [Text(*part) if isinstance(part, tuple) else Text(part) for part in parts]
        line = Text("  ").join([Text(f"trial {trial.number:>3}"), *filter(None, texts)])
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def values(self, values: Sequence[float]) -> str:
        """Return the values of the objectives, or of the first ones, with their names."""
        pairs = zip(self._objectives, values, strict=False)
        return ", ".join(f"{one.metric} {format_metric(one.metric, value)}" for one, value in pairs)

    def _facts(self, trial: FrozenTrial, progress: Mapping[str, Any]) -> list[str]:
        reported = [] if trial.last_step is None else [trial.intermediate_values[trial.last_step]]
        facts = [f"{progress['budget_used']:4.0%}"] if progress else []
        facts.append(self.values(reported))
        if progress:
            loss, rate = progress["train_loss"], progress["examples_per_second"]
            facts.append(f"step {progress['step']}")
            facts += [] if loss is None else [f"loss {loss:.3g}"]
            facts += [] if rate is None else [f"{rate:.3g} ex/s"]
        return facts
