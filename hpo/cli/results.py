"""The commands that show and explain what a study has found."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import typer

import hpo
from hpo.cli.options import IN_POINTS, TRUST, Answer, answer, flag, folder, option, optional, study_command
from hpo.config.choices import CONFIGURATIONS, MOST_SEEDS, TrackerName
from hpo.errors import InputError


@study_command(
    watch=flag("--watch", "Show it again and again until the study is over, or Ctrl-C (exit code 130)."),
    interval=optional(int, "SECONDS", "Seconds between two updates of --watch.", "5", min=1, max=86400),
)
def status(study: hpo.Study, *, watch: bool, as_json: bool, interval: int = 0) -> Answer | None:
    """Show trials by outcome, the best so far, live workers, the rate and the estimated end."""
    from hpo.report import screens
    from hpo.report.status import study_status

    if watch and as_json:
        raise InputError("--watch shows a screen, so --json must be left out.")
    if watch:
        _watch(study, interval or 5)
        return None
    if interval:
        raise InputError("--interval needs --watch: it is the number of seconds between two updates.")
    record = study.outline
    numbers = study_status(record)
    return Answer(numbers, screens.status(record, numbers))


def _watch(study: hpo.Study, seconds: int) -> None:
    from hpo.report.screens import watched
    from hpo.report.terminal import print_live
    from hpo.study.reading.reader import read_study

    with study.opened(brief=True) as (database, first):
        try:
            print_live(watched(lambda: read_study(database, first.name, brief=True), seconds))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


@study_command(
    *TRUST,
    split=optional(
        Literal["train", "validation", "test"],
        "SPLIT",
        "Evaluate its checkpoint in detail on a split: train, validation or test; it is stored.",
        names=["--evaluate"],
    ),
    folder=folder("Write a model that transformers and hpo load.", "--export"),
    merge=flag("--merge", "Of --export: add an adapter to the weights of the encoder."),
    reproduce=flag("--reproduce", "Train it again from its record. Exit code 1: the result is another."),
    into=folder("Of --reproduce: keep the checkpoints.", "--into"),
)
def best(study: hpo.Study, *, reproduce: bool, into: Path | None = None, **options: Any) -> Answer:
    """Show the best configuration and its scores; evaluate, export or reproduce its model.

    With several objectives it shows the Pareto front, and uses the best by the first of them.
    """
    if reproduce:
        return _reproduced(study, into, options)
    if into:
        raise InputError("--into is where --reproduce keeps its checkpoints: give --reproduce, too.")
    from hpo.report.best_screens import best_as_json, best_model
    from hpo.study.reading.study_record import choosable_trials

    record, used = study.use_best(**options)
    shown = best_model(record, options.get("split"), used.get("export"))
    return Answer(lambda: best_as_json(record) | used, shown, 0 if choosable_trials(record) else 1)


def _reproduced(study: hpo.Study, into: Path | None, others: Mapping[str, Any]) -> Answer:
    if any(others.values()):
        raise InputError("--reproduce must be alone: --evaluate and --export are about the stored model.")
    found = study.reproduce(into)
    return Answer({"study": study.name, **found.as_json()}, found.text(), 0 if found.same else 1)


@study_command(
    *("workers", "until"),
    *TRUST,
    over=optional(
        Literal["fp_precision", "base_precision", "optimizer_state"],
        "SETTING",
        "What is compared: of training, of the weights under an adapter, of the moments.",
        "fp_precision",
    ),
    configurations=flag(
        "--configurations", "Show the best configurations on new seeds, in their own precision, unjudged."
    ),
    precisions=optional(str, "NAMES", "Precisions to compare with fp32: bf16,fp16.", "all that run here"),
    top=optional(int, "K", "Configurations.", "3", min=1, max=20),
    seeds=optional(int, "N", "New seeds before the first look.", "3", min=3, max=MOST_SEEDS),
    max_seeds=optional(int, "N", "Most seeds; may be raised later.", "12", min=3, max=MOST_SEEDS),
    margin=optional(float, "POINTS", f"A smaller loss does not count. {IN_POINTS}", "0.5", min=1e-6),
)
def compare(
    study: hpo.Study, *, configurations: bool, over: str | None = None, precisions: str = "", **options: Any
) -> Answer:
    """Compare precisions on new seeds: is one as good as fp32, and how much faster? Goes on where it was."""
    from hpo.api.comparing import ComparisonStopped
    from hpo.compare.planning import refuse_options
    from hpo.config.comparison import question_of
    from hpo.precision.table import PRECISION
    from hpo.report.verdicts import comparison_parts

    if configurations and over:
        refuse_options(["over"])
    question = CONFIGURATIONS if configurations else question_of(over or PRECISION)
    names = tuple(name.strip() for name in precisions.split(",")) if precisions else None
    try:
        result = study.compare(question, precisions=names, **options)
    except ComparisonStopped as stopped:
        ended = stopped.result
        code = ended.exit_code or int(ended.ended == "elsewhere")
        return Answer(ended.as_json, ended.how_to_go_on(), code)
    return Answer(result, comparison_parts(result))


@study_command(*TRUST, trial=option(int, "N", "Its number.", min=0))
def diagnose(study: hpo.Study, trial: int) -> Answer:
    """Name the operator that broke a trial and what helps, by the batch after its checkpoint.

    Tries a lower loss scale, bf16 and fp32. Changes nothing in the study. Exit code 1: that batch is finite.
    """
    from dataclasses import asdict

    found = study.diagnose(trial)
    return Answer({"study": study.name, **asdict(found)}, found.text(), 0 if found.broken else 1)


@study_command(folder=folder("Folder.", "--out", default="runs/STUDY/report"))
def report(study: hpo.Study, **options: Any) -> Answer:
    """Write one self-contained HTML file and CSV tables."""
    path = str(study.report(**options))
    return Answer({"study": study.name, "report": path}, path)


@study_command(
    port=optional(int, "PORT", "0 takes a free one.", min=0, max=65535, default="8080"),
    host=optional(str, "ADDRESS", "0.0.0.0 in a container that publishes the port.", default="127.0.0.1"),
)
def dashboard(study: hpo.Study, *, as_json: bool, **options: Any) -> None:
    """Serve optuna-dashboard on 127.0.0.1 with our notes and plots in the study."""
    with study.dashboard(**options) as served:
        if served.warning:
            typer.echo(f"Warning: {served.warning}", err=True)
        told = {"study": study.name, "url": served.url}
        answer(told, f"{served.url} (Ctrl-C ends it)", as_json=as_json)
        with suppress(KeyboardInterrupt):
            served.serve_forever()


@study_command(
    to=option(TrackerName, "NAME", "mlflow, tensorboard or wandb. Its own variables say where it is."),
    follow=flag("--follow", "Keep the tracker up to date until the study ends."),
    folder=folder("Files of tensorboard and of wandb.", default="runs/STUDY/tensorboard, runs/STUDY"),
    with_parent=flag("--with-parent", "End when the standard input does.", hidden=True),
)
def track(study: hpo.Study, **options: Any) -> Any:
    """Show a study in a tracker: each trial as one run. Called again, it adds what is new."""
    return study.track(**options)
