"""The commands to show and explain the results of a study."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

import hpo
from hpo.cli.options import IN_POINTS, TRUST, Answer, answer, flag, folder, option, optional, study_command
from hpo.config.choices import CONFIGURATIONS, MOST_SEEDS, TrackerName
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.api.stored import StoredStudy


@study_command(
    needs_models=False,
    watch=flag("--watch", "Update every 5 s until the end of the study, or Ctrl-C (exit code 130)."),
)
def status(study: StoredStudy, *, watch: bool, as_json: bool) -> Any:
    """Show trials by outcome, the best so far, live workers, the rate and the estimated end."""
    from hpo.report.screens import watched
    from hpo.report.terminal import print_live
    from hpo.study.reading.reader import read_study

    if watch and as_json:
        raise InputError("--watch shows a screen, so --json must be left out.")
    if not watch:
        return study.status()
    with study.opened() as (database, first):
        try:
            print_live(watched(lambda: read_study(database, first.name), 5.0))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


@study_command(
    *TRUST,
    needs_models=("split", "folder", "merge", "reproduce"),
    split=optional(
        Literal["train", "validation", "test"],
        "SPLIT",
        "Evaluate its checkpoint in detail on train, validation or test, and store the result.",
        names=["--evaluate"],
    ),
    folder=folder("Write the model for transformers and hpo.load.", "--export"),
    merge=flag("--merge", "With --export: add an adapter to the weights of the encoder."),
    reproduce=flag("--reproduce", "Train it again from its record. Exit code 1: another result."),
    into=folder("With --reproduce: keep the checkpoints.", "--into"),
)
def best(study: StoredStudy, *, reproduce: bool, into: Path | None = None, **options: Any) -> Answer:
    """Show the best configuration and its scores; evaluate, export or reproduce its model.

    With several objectives, show the Pareto front, and use the best trial by the first objective.
    """
    from hpo.report.best_screens import best_as_json, best_model
    from hpo.study.reading.study_record import choosable_trials

    if into and not reproduce:
        raise InputError("--into is an option of --reproduce: give --reproduce, too.")
    used: dict[str, Any] = {}
    if any((reproduce, *options.values())):
        assert isinstance(study, hpo.Study)  # its import takes seconds
        if reproduce:
            return _reproduced(study, into, options)
        record, used = study.use_best(**options)
    else:
        record = study.record
    shown = best_model(record, options.get("split"), used.get("export"))
    return Answer(lambda: best_as_json(record) | used, shown, 0 if choosable_trials(record) else 1)


def _reproduced(study: hpo.Study, into: Path | None, others: Mapping[str, Any]) -> Answer:
    if any(others.values()):
        raise InputError("--reproduce must be alone: --evaluate and --export are about the stored model.")
    result = study.reproduce(into)
    return Answer({"study": study.name, **result.as_json()}, result.text(), 0 if result.same else 1)


@study_command(
    *("workers", "until"),
    *TRUST,
    over=optional(
        Literal["fp_precision", "base_precision", "optimizer_state"],
        "SETTING",
        "Setting to compare: of training, of the weights under an adapter, of the moments.",
        "fp_precision",
    ),
    configurations=flag(
        "--configurations", "Show the best configurations on new seeds, in their precision, without verdict."
    ),
    precisions=optional(str, "NAMES", "Precisions to compare with fp32: bf16,fp16.", "all available"),
    top=optional(int, "K", "Number of configurations.", "3", min=1, max=20),
    seeds=optional(int, "N", "New seeds before the first verdict.", "3", min=3, max=MOST_SEEDS),
    max_seeds=optional(int, "N", "Most seeds; may be raised later.", "36 runs", min=3, max=MOST_SEEDS),
    margin=optional(float, "POINTS", f"Losses below this are ignored. {IN_POINTS}", "0.5", min=1e-6),
    anyway=flag("--anyway", "Train also if no precision can be shown to be as good."),
)
def compare(
    study: hpo.Study, *, configurations: bool, over: str | None = None, precisions: str = "", **options: Any
) -> Any:
    """Compare precisions with fp32 on new seeds: quality and speed. A later call continues."""
    from hpo.api.comparing import ComparisonStopped
    from hpo.compare.planning import refuse_options
    from hpo.config.comparison import question_of
    from hpo.precision.table import PRECISION

    if configurations and over:
        refuse_options(["over"])
    question = CONFIGURATIONS if configurations else question_of(over or PRECISION)
    names = tuple(name.strip() for name in precisions.split(",")) if precisions else None
    try:
        return study.compare(question, precisions=names, **options)
    except ComparisonStopped as stopped:
        ended = stopped.result
        code = ended.exit_code or int(ended.ended == "elsewhere")
        return Answer(ended.as_json, ended.how_to_continue(), code)


@study_command(*TRUST, trial=option(int, "N", "Its number.", min=0))
def diagnose(study: hpo.Study, trial: int) -> Answer:
    """Name the operator that broke a trial, and the remedy, from the batch after its checkpoint.

    Tries a lower loss scale, bf16 and fp32. Changes nothing in the study. Exit code 1: that batch is finite.
    """
    result = study.diagnose(trial)
    return Answer({"study": study.name, **asdict(result)}, result.text(), 0 if result.broken else 1)


@study_command(needs_models=False, folder=folder("Folder.", "--out", default="runs/STUDY/report"))
def report(study: StoredStudy, **options: Any) -> Answer:
    """Write one self-contained HTML file and CSV tables."""
    from hpo.api import showing

    path = str(showing.report(study, **options))
    return Answer({"study": study.name, "report": path}, path)


@study_command(
    needs_models=False,
    port=optional(int, "PORT", "0 takes a free one.", min=0, max=65535, default="8080"),
    host=optional(str, "ADDRESS", "Address to listen on; 0.0.0.0 in a container.", default="127.0.0.1"),
)
def dashboard(study: StoredStudy, *, as_json: bool, **options: Any) -> None:
    """Serve optuna-dashboard on 127.0.0.1, with our notes and plots in the study."""
    from hpo.api import showing

    with showing.dashboard(study, **options) as served:
        if served.warning:
            typer.echo(f"Warning: {served.warning}", err=True)
        content = {"study": study.name, "url": served.url}
        answer(content, f"{served.url} (Ctrl-C ends it)", as_json=as_json)
        with suppress(KeyboardInterrupt):
            served.serve_forever()


@study_command(
    needs_models=False,
    to=option(TrackerName, "NAME", "mlflow, tensorboard or wandb; set its location by its own variables."),
    follow=flag("--follow", "Update until the study ends or has had no worker for 10 minutes."),
    folder=folder("Files of tensorboard and of wandb.", default="runs/STUDY/tensorboard, runs/STUDY"),
    with_parent=flag("--with-parent", "End at the end of the standard input.", hidden=True),
)
def track(study: StoredStudy, **options: Any) -> Any:
    """Show each trial as a run of a tracker. A later call adds new trials and changes."""
    from hpo.api import showing

    return showing.track(study, **options)
