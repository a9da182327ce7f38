"""What the commands share: their options, and how they answer."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.api.opening import trust
from hpo.errors import printable

if TYPE_CHECKING:
    from hpo.study.running.stopping import Stop

app = typer.Typer(
    help="Hyperparameter search for multitask transformer encoders, with precision as a searched dimension.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _positive_seconds(value: float | None) -> float | None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"must be a number of seconds > 0, but got {value:g}.")
    return value


def option(kind: Any, metavar: str, help_text: str, **more: Any) -> Any:
    """An option in a table for `with_options` or `study_command`."""
    return Annotated[kind, typer.Option(metavar=metavar, help=help_text, **more)]


StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="A name in studies/, or a YAML file.")]
StoredStudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="A name in the database.")]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the code that comes with an encoder, where the study asks for that in the database.",
    ),
]


def _trust(files: list[str]) -> list[str]:
    for file in files:
        trust(file)
    return files


TrustCodeOption = Annotated[
    list[str],
    typer.Option(
        "--trust-code",
        metavar="FILE",
        callback=_trust,
        help="Run this code, a file or module of this machine, where a study or model needs it. Repeatable.",
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="HPO_STORAGE",
        help="Database of the study: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.",
        show_default="sqlite:///runs/hpo.db, in the working folder",
    ),
]
NumTrialsOption = Annotated[
    int | None,
    typer.Option(min=1, max=100_000, metavar="N", help="Total of the study, over all workers and runs."),
]
HoursOption = Annotated[
    float | None,
    typer.Option(min=0.001, metavar="H", help="Budget of the study in device-hours, in place of its trials."),
]
ParamOption = Annotated[
    list[str],
    typer.Option("--param", "-p", metavar="NAME=VALUE", help="A setting of the trial. Repeatable."),
]
UntilOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="When this job ends: 18:30, 2026-11-22T18:30 or +3600 (seconds from now). No trial begins that "
        "would not reach its next evaluation, and the trial in hand is checkpointed before.",
        show_default="SLURM_JOB_END_TIME",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1000,
        metavar="W",
        help="Processes on this machine, spread over its GPUs.",
        show_default="1",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
WORK_OPTIONS: Mapping[str, Any] = {
    "workers": WorkersOption,
    "workers_per_device": option(
        int | None,
        "K",
        "Processes for each GPU of this machine, or on its CPU; not with --workers.",
        min=1,
        max=100,
    ),
    "timeout": option(
        float | None, "SECONDS", "No further trial begins after so long.", callback=_positive_seconds
    ),
    "until": UntilOption,
}


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _own_options(
    command: Callable[..., None], tables: Sequence[Mapping[str, Any]]
) -> list[inspect.Parameter]:
    """The parameters of a command, with the options of the tables in place of its `**options`."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    return named + [_parameter(name, annotation) for table in tables for name, annotation in table.items()]


def _set_options(command: Callable[..., None], options: Sequence[inspect.Parameter]) -> None:
    """Have typer read these options instead of the parameters in the code of the command."""
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in options}


def with_options(*tables: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes `**options` those of the tables, None where they are not given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _set_options(command, _own_options(command, tables))
        return command

    return decorate


def study_command(
    *tables: Mapping[str, Any], runs_code: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command about one study.

    The function takes the `hpo.Study`, `as_json` and its own options. STUDY, --storage, --json and,
    with `runs_code`, the options to trust code are added.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(
            study: str, storage: str | None, *, as_json: bool, trust_remote_code: bool = False, **options: Any
        ) -> None:
            from hpo.memory import collector_paused

            with collector_paused():
                from hpo.api.study import Study

            options.pop("trust_code", None)  # its callback has named the code
            opened = Study(study, storage=storage, trust_remote_code=trust_remote_code, quiet=as_json)
            command(opened, as_json=as_json, **options)

        for name in ("opened", "as_json"):
            del command.__annotations__[name]
        own = [each for each in _own_options(command, tables) if each.name not in ("opened", "as_json")]
        own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        trust = [
            _parameter("trust_remote_code", TrustOption, False),
            _parameter("trust_code", TrustCodeOption, []),
        ]
        shared = [_parameter("storage", StorageOption), *(trust if runs_code else [])]
        study = _parameter("study", StudyArgument, inspect.Parameter.empty)
        _set_options(run, [study, *own, *shared, _parameter("as_json", JsonOption, False)])
        app.command()(run)
        return run

    return decorate


def print_json(value: Any) -> None:
    """Print `value` as the only output of a command with `--json`."""
    from hpo.json_safe import json_safe

    typer.echo(json.dumps(json_safe(value), indent=2, default=str))


def answer(value: Any, text: str, *, as_json: bool) -> None:
    """Print what a command has done: as JSON, or in words, which may come from a database."""
    print_json(value) if as_json else typer.echo(printable(text))


@contextmanager
def ended_at_once() -> Iterator[None]:
    """A SIGINT that ends the command at once does so with a word on what that means."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            "Ended at once. A trial goes on from its last checkpoint when its study is run again.", err=True
        )
        raise typer.Exit(130) from None


@contextmanager
def stop_signals(until: str | None = None, timeout: float | None = None) -> Iterator[Stop]:
    """`stop_on_signals`, and `ended_at_once`."""
    from hpo.study.running.stopping import end_of_job, stop_on_signals

    with ended_at_once(), stop_on_signals(end_of_job(until), timeout) as stop:
        yield stop
