"""The command `deploy`: the form of a study's best model that is as good as fp32 and the fastest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpo.cli.options import (
    RUNS,
    JsonOption,
    StorageOption,
    StudyArgument,
    TrustCodeOption,
    TrustOption,
    app,
    checkpoint_of,
    config_of,
    existing_study,
    print_json,
    progress_shown,
    stop_signals,
    with_options,
)
from hpo.errors import InputError, Preempted, RunError

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.data.dataset import DataSet
    from hpo.deploy.deployment import DeploymentRequest
    from hpo.deploy.result import Deployment
    from hpo.study.reading.study_record import StudyRecord, TrialRecord
    from hpo.study.running.stopping import Stop
    from hpo.study.store.storage import Storage

TIMEOUT_SECONDS = 1800.0

DEPLOYMENT_OPTIONS: Mapping[str, Any] = {
    "timeout": Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="After so long no further form is begun, and the choice is among those that are scored.",
            show_default=f"{TIMEOUT_SECONDS:g}",
        ),
    ],
    "max_drop": Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            metavar="POINTS",
            help="What loses more is refused; in hundredths, of mae and rmse in the labels' units.",
            show_default="1",
        ),
    ],
    "batch": Annotated[
        int | None,
        typer.Option(metavar="SIZE", help="Batch whose latency decides: 1 or 32.", show_default="1"),
    ],
    "threads": Annotated[
        int | None,
        typer.Option(min=1, max=1024, metavar="N", help="Threads.", show_default="one a core"),
    ],
    "artifacts": Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Which, beside fp32: bf16,onnx_int8_dynamic.",
            show_default="all that this machine can have",
        ),
    ],
    "device": Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        typer.Option(metavar="DEVICE", help="auto, cpu or cuda.", show_default="cpu"),
    ],
}

MODEL, ARTIFACTS, EXPORT = "model", "artifacts", "export"
"""Folders in that of a deployment; the first alone is there in the end."""


@app.command()
@with_options(DEPLOYMENT_OPTIONS)
def deploy(
    study: StudyArgument,
    storage: StorageOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Folder.", show_default="runs/STUDY/deploy"),
    ] = None,
    trust_remote_code: TrustOption = False,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Find the fastest form of the best model that is as good as fp32: bf16, fp16, ONNX, int8.

    Chosen on validation, reported on test. Writes it to DIR/model with deploy.json and deploy.html. Ctrl-C
    ends the search with the forms that are scored by then; a second one leaves nothing.
    """
    from hpo.models.export import new_folder

    with (
        progress_shown(quiet=as_json),
        stop_signals(timeout=options["timeout"] or TIMEOUT_SECONDS) as stop,
        existing_study(study, storage) as (database, record),
    ):
        trial = _best(record)
        config = config_of(study, record, trust_remote_code)
        folder = out or RUNS / config.name / "deploy"
        with new_folder(folder, "deploy.json") as staging:
            stored = _deploy((config, database), trial, options, stop, staging).as_json()
            _finish(stored, staging, folder)
    if as_json:
        print_json(stored | {"folder": str(folder)})
    else:
        from hpo.cli.display import print_deployment

        print_deployment(stored, folder)
    raise typer.Exit(130 if stop.is_set() else 0)


def _best(record: StudyRecord) -> TrialRecord:
    """The best trial; with several objectives by the first of them that says something of the model.

    Raises RunError where there is none, or none meets the limits of the study.
    """
    from hpo.compare.planning import by_rank
    from hpo.study.reading.study_record import best_trials, nearest_told

    ranked = by_rank(record)
    if not ranked:
        none_yet = f"the study {record.name} has no complete trial yet, whose model could be deployed."
        raise RunError(nearest_told(record) or none_yet)
    return best_trials(record)[0] if len(record.metric_names) == 1 else ranked[0]


def _request(config: StudyConfig, data: DataSet, options: Mapping[str, Any], stop: Stop) -> DeploymentRequest:
    """What the options ask for. Raises InputError where that cannot be done with the study's data."""
    from hpo.compare.companion import unlabelled_in_test
    from hpo.deploy.artifacts import NAMES, parse_names
    from hpo.deploy.deployment import DeploymentRequest
    from hpo.deploy.timing import BATCH_SIZES
    from hpo.trial.objectives import quality_objective, unit_of

    batch, max_drop = options["batch"] or 1, options["max_drop"]
    if batch not in BATCH_SIZES:
        raise InputError(f"--batch must be {' or '.join(map(str, BATCH_SIZES))}, but got {batch}.")
    names = parse_names(options["artifacts"]) if options["artifacts"] else NAMES
    metric = quality_objective(config.objective).metric
    if max_drop is None and unit_of(metric) != "points":
        raise InputError(f"--max-drop must be given: {metric} is in {unit_of(metric)}, no default fits.")
    has_test = "test" in data.splits and not unlabelled_in_test(config, data)
    return DeploymentRequest(
        names,
        1.0 if max_drop is None else max_drop,
        batch,
        has_test,
        ends=partial(_why_it_ends, stop),
    )


def _why_it_ends(stop: Stop) -> str:
    if stop.is_set():
        return "the search was told to stop"
    return "the time of --timeout was over" if time.monotonic() > stop.deadline else ""


def _deploy(
    study: tuple[StudyConfig, Storage],
    trial: TrialRecord,
    options: Mapping[str, Any],
    stop: Stop,
    staging: Path,
) -> Deployment:
    """Export the trial and compare the forms of its model, all in folders of `staging`.

    Raises RunError where it has no weights, or not even fp32 is scored in time. Ends the command where it is
    stopped before.
    """
    import torch

    from hpo.deploy.deployment import Candidate, Place, deploy
    from hpo.device import limit_threads, probe_device
    from hpo.trial.best_model import TrialSource, export_checkpoint

    name = options["device"] or "cpu"
    device = probe_device(name)
    executor, checkpoint = checkpoint_of(*study, trial, device=name)
    request = _request(study[0], executor.dataset, options, stop)
    limit_threads(probe_device("cpu"))
    torch.set_num_threads(options["threads"] or torch.get_num_threads())
    source = TrialSource(trial.number, trial.params, trial.telemetry)
    exported = export_checkpoint(executor, checkpoint, staging / EXPORT, source, merge=True)
    place = Place(device, staging / ARTIFACTS, RUNS / "cache" / "tokens")
    stop.can_checkpoint = True  # from here on there is something to keep
    try:
        return deploy(study[0], executor.dataset, Candidate(trial.number, exported), request, place)
    except Preempted as error:
        if stop.is_set():
            typer.echo("Stopped before fp32 was scored: nothing is kept.", err=True)
            raise typer.Exit(130) from None
        raise RunError(f"fp32 was {error} Give it longer.") from None


def _finish(stored: Mapping[str, Any], staging: Path, folder: Path) -> None:
    """Write the numbers and the page; keep the chosen form."""
    import json
    import shutil

    from hpo.report.deployment_page import deployment_html

    shutil.rmtree(staging / EXPORT)
    chosen = staging / ARTIFACTS / stored["artifacts"][stored["chosen"]]["artifact"]
    chosen.rename(staging / MODEL)
    shutil.rmtree(staging / ARTIFACTS)
    (staging / "deploy.json").write_text(json.dumps(stored, indent=2) + "\n")
    (staging / "deploy.html").write_text(deployment_html(stored, str(folder / MODEL)), encoding="utf-8")
