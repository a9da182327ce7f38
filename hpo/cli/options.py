"""Turn functions into commands: their options and their output.

A command names the options that it shares with others and defines its own. A function does not receive an
option that the user leaves out: the library has the default, and the help states it. The function returns a
result with `text` for a person and `as_json` for `--json`, and perhaps an `exit_code` and an `error`.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args, get_origin

import typer

from hpo.collector import collector_paused
from hpo.errors import RunError, printable
from hpo.json_safe import json_safe

if TYPE_CHECKING:
    from hpo.report.terminal import Part

Function = Callable[..., Any]

app = typer.Typer(
    help="Hyperparameter search for multitask transformers, with numeric precision as a searched dimension.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def option(kind: Any, metavar: str, help_text: str, names: Sequence[str] = (), **more: Any) -> Any:
    """Return the type of a parameter for an option, which may have its own `names`."""
    return Annotated[kind, typer.Option(*names, metavar=metavar, help=help_text, **more)]


def optional(kind: Any, metavar: str, help_text: str, default: str = "", **more: Any) -> Any:
    """Return the type of an optional option; the help states the library's `default`."""
    return option(kind | None, metavar, help_text, **({"show_default": default} if default else {}), **more)


def flag(name: str, help_text: str, **more: Any) -> Any:
    return Annotated[bool, typer.Option(name, metavar="", help=help_text, **more)]  # typer shows `<bool>`


def folder(help_text: str, *names: str, default: str = "") -> Any:
    return optional(Path, "DIR", help_text, default, names=names, file_okay=False)


def argument(kind: Any, metavar: str, help_text: str, complete: Any = None) -> Any:
    return Annotated[kind, typer.Argument(metavar=metavar, help=help_text, autocompletion=complete)]


def _studies(incomplete: str) -> list[str]:
    """Return studies for a shell: names, files here, and stored ones of SQLite, but never of a server."""
    names = {*map(str, Path().glob("*.yaml"))}
    for folder in (Path("studies"), Path(__file__).parents[1] / "studies"):  # as `study_files`, but fast
        names |= {path.stem for path in folder.glob("*.yaml")}
        names |= {path.parent.name for path in folder.glob("examples/*/study.yaml")}
    kind, _, file = (os.environ.get("HPO_STORAGE") or "sqlite:///runs/hpo.db").partition(":///")
    if kind == "sqlite":
        uri = f"{Path(file.partition('?')[0]).absolute().as_uri()}?mode=ro"
        with suppress(sqlite3.Error), closing(sqlite3.connect(uri, uri=True, timeout=0.1)) as database:
            names |= {name for (name,) in database.execute("SELECT name FROM hpo_studies")}
    return sorted(name for name in names if name.startswith(incomplete))


def _positive_seconds(value: float | None) -> float | None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"must be a number of seconds > 0, but got {value:g}.")
    return value


def _trust(files: list[str]) -> list[str]:
    if files:
        from hpo.api.opening import trust

        for file in files:
            trust(file)
    return files


StudyArgument = argument(str, "STUDY", "Name of a study, or its YAML file or folder.", _studies)
StoredStudyArgument = argument(str, "STUDY", "A name in the database, or a YAML file.", _studies)
OPTIONS: Mapping[str, Any] = {
    "as_json": flag("--json", "Print JSON instead of text."),
    "storage": optional(
        str,
        "URL",
        "Database of the study: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.",
        "sqlite:///runs/hpo.db, in the working folder",
        envvar="HPO_STORAGE",
    ),
    "trust_remote_code": flag(
        "--trust-remote-code", "Let a study in the database run the code of its encoder."
    ),
    "trust_code": option(
        list[str],
        "FILE",
        "Let a study or model run this code: a file, a module or a sampler's class. Repeatable.",
        callback=_trust,
    ),
    "n_trials": optional(int, "N", "Trials of the study, over all workers and runs.", min=1, max=100_000),
    "hours": optional(float, "H", "Budget in device-hours, in place of a number of trials.", min=0.001),
    "workers": optional(int, "W", "Worker processes to start, spread over the GPUs.", "1", min=1, max=1000),
    "workers_per_device": optional(
        int, "K", "Worker processes for each GPU, or on the CPU; not with --workers.", min=1, max=100
    ),
    "timeout": optional(float, "SECONDS", "Begin no trial after this time.", callback=_positive_seconds),
    "until": optional(
        str,
        "TIME",
        "End of this job: 18:30, 2026-11-22T18:30 or +3600 (seconds from now). The running trial is "
        "checkpointed before, and no trial begins too late for an evaluation.",
        "SLURM_JOB_END_TIME",
    ),
    "params": option(list[str], "NAME=VALUE", "A setting of the trial. Repeatable.", ("--param", "-p")),
}
"""The options of more than one command."""
IN_POINTS = "In points (hundredths); for mae and rmse in the labels' units."
WORK = ("workers", "workers_per_device", "timeout", "until")
TRUST = ("trust_remote_code", "trust_code")


@dataclass(frozen=True)
class Answer:
    """Result of a command without a class of its own."""

    content: Any
    """Content for `--json`, or a function that returns it."""
    shown: str | Iterable[Part] = ""
    exit_code: int = 0

    def as_json(self) -> Any:
        return self.content() if callable(self.content) else self.content

    def text(self) -> str | Iterable[Part]:
        return self.shown


def command(
    *names: str,
    group: typer.Typer = app,
    of_study: Any = None,
    needs_models: bool | Sequence[str] = True,
    **own: Any,
) -> Callable[[Function], Function]:
    """Make a function a command with the options `names` of `OPTIONS` and its `own`.

    With `of_study`, the type of the argument STUDY, the function receives a `hpo.Study` first. It receives a
    `ManagedStudy`, which is imported much faster, without `needs_models`, or without all options in it. A
    function that prints by itself takes `as_json`.
    """
    if of_study is not None:
        names, own = (*names, "storage"), {"study": of_study, **own}

    def decorate(function: Function) -> Function:
        left_out = {"as_json", "trust_code"} - inspect.signature(function).parameters.keys()

        @functools.wraps(function)
        def run(**given: Any) -> NoReturn:
            as_json = given["as_json"]
            given = {name: of for name, of in given.items() if of is not None and name not in left_out}
            arguments = []
            if of_study is not None:
                is_whole = needs_models is True or any(given.get(name) for name in needs_models or ())
                arguments = [_study(given, quiet=as_json, is_whole=is_whole)]
            with ended_at_once():
                result = function(*arguments, **given)
                if result is not None:
                    answer(result.as_json, () if as_json else result.text(), as_json=as_json)
            if error := getattr(result, "error", ""):
                raise RunError(error)
            raise typer.Exit(getattr(result, "exit_code", 0))

        options = own | {name: OPTIONS[name] for name in (*names, "as_json")}
        parameters = [_parameter(name, of) for name, of in options.items()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = options
        group.command()(run)
        return function

    return decorate


study_command = functools.partial(command, of_study=StudyArgument)
stored_study_command = functools.partial(command, of_study=StoredStudyArgument)


def _study(given: dict[str, Any], *, quiet: bool, is_whole: bool) -> Any:
    """Take the study's arguments out of `given` and return the study."""
    arguments = {name: given.pop(name) for name in ("study", "storage", "trust_remote_code") if name in given}
    with collector_paused():
        from hpo.api.managed import ManagedStudy
    study = ManagedStudy(**arguments, quiet=quiet)  # refuses a wrong file before the import of transformers
    if not is_whole:
        return study
    with collector_paused():
        from hpo.api.study import Study
    return Study(**arguments, quiet=quiet)


def _parameter(name: str, of: Any) -> inspect.Parameter:
    """Return a parameter for typer. Lists, flags, and options with None may be left out."""
    kind = of.__origin__
    default: Any = None if type(None) in get_args(kind) else inspect.Parameter.empty
    if kind is bool or get_origin(kind) is list:
        default = False if kind is bool else []
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=of)


def print_json(value: Any) -> None:
    """Print `value` as the only output of a command with `--json`."""
    typer.echo(json.dumps(json_safe(value), indent=2, default=str))


def answer(value: Any, text: str | Iterable[Part], *, as_json: bool) -> None:
    """Print the result of a command as JSON or as text without escape sequences."""
    if as_json:
        print_json(value() if callable(value) else value)
    elif isinstance(text, str):
        typer.echo(printable(text))
    else:
        from hpo.report.terminal import print_parts

        print_parts(text)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Explain the effect of a SIGINT that ends the command at once."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            "Ended at once. Run the study again to continue its trial from the last checkpoint.", err=True
        )
        raise typer.Exit(130) from None
