"""The command `deploy`: the form of a study's best model that is as good as fp32 and the fastest."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpo.cli.options import (
    RUNS,
    JsonOption,
    StorageOption,
    StudyArgument,
    TrustOption,
    app,
    checkpoint_of,
    config_of,
    existing_study,
    print_json,
    progress_shown,
    with_options,
)
from hpo.errors import InputError, RunError, did_you_mean

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.data.dataset import DataSet
    from hpo.deploy.deployment import Candidate
    from hpo.deploy.request import DeploymentRequest
    from hpo.deploy.result import Deployment
    from hpo.study.storage import Storage
    from hpo.study.study_record import StudyRecord, TrialRecord
    from hpo.trial.executor import Executor

DEPLOYMENT_OPTIONS: Mapping[str, Any] = {
    "top": Annotated[
        int | None, typer.Option(min=1, max=20, metavar="K", help="Trials, the best first.", show_default="1")
    ],
    "split": Annotated[
        Literal["train", "validation", "test"] | None,
        typer.Option(
            metavar="SPLIT",
            help="Rows to score and to time.",
            show_default="test, or validation where there is none",
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

MODEL, ARTIFACTS, EXPORTS = "model", "artifacts", "exports"
"""Folders in that of a deployment; the last is gone in the end."""

_logger = logging.getLogger("hpo.deploy")


@app.command()
@with_options(DEPLOYMENT_OPTIONS)
def deploy(
    study: StudyArgument,
    storage: StorageOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Folder.", show_default="runs/STUDY/deploy"),
    ] = None,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Keep every artifact, in artifacts/, not only the chosen one.")
    ] = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Find the fastest form of the best model that is as good as fp32: bf16, fp16, ONNX, int8.

    Writes it to DIR/model with deploy.json, deploy.html and deploy.png.
    """
    from hpo.models.export import new_folder

    with progress_shown(quiet=as_json), existing_study(study, storage) as (database, record):
        trials = _best(record, options["top"] or 1)
        config = config_of(study, record, trust_remote_code)
        folder = out or RUNS / config.name / "deploy"
        with new_folder(folder, "deploy.json") as staging:
            found = _deploy((config, database), trials, options, staging)
            stored = found.as_json() | {"command": shlex.join(["hpo", *sys.argv[1:]])}
            _finish(stored, found.best.folder, staging, folder, keep_all=keep_all)
    if as_json:
        print_json(stored | {"folder": str(folder)})
    else:
        from hpo.cli.display import print_deployment

        print_deployment(stored, folder)


def _best(record: StudyRecord, top: int) -> list[TrialRecord]:
    """The best trial first, then the next ones, each configuration once. Raises RunError without any.

    With several objectives the best is so by the first of them that says something of the model.
    """
    from hpo.compare.companion import by_rank
    from hpo.study.study_record import best_trials

    ranked = by_rank(record)
    if not ranked:
        raise RunError(f"the study {record.name} has no complete trial yet, whose model could be deployed.")
    best = best_trials(record)[0] if len(record.metric_names) == 1 else ranked[0]

    def is_other(trial: TrialRecord) -> bool:
        return len(by_rank(replace(record, trials=[best, trial]))) > 1

    return [best, *filter(is_other, ranked)][:top]


def _request(config: StudyConfig, data: DataSet, options: Mapping[str, Any]) -> DeploymentRequest:
    """What the options ask for. Raises InputError where that cannot be done with the study's data."""
    from hpo.compare.companion import unlabelled_in_test
    from hpo.deploy.artifacts import NAMES, parse_names
    from hpo.deploy.request import DeploymentRequest
    from hpo.deploy.timing import BATCH_SIZES
    from hpo.trial.objectives import quality_objective, unit_of

    batch, split, max_drop = options["batch"] or 1, options["split"], options["max_drop"]
    if batch not in BATCH_SIZES:
        raise InputError(f"--batch must be {' or '.join(map(str, BATCH_SIZES))}, but got {batch}.")
    names = parse_names(options["artifacts"]) if options["artifacts"] else NAMES
    if split is None:
        has_test = "test" in data.splits and not unlabelled_in_test(config, data)
        split = "test" if has_test else "validation"
    if split not in data.splits:
        raise InputError(f"--split: there is no split {split!r}.{did_you_mean(split, list(data.splits))}")
    metric = quality_objective(config.objective).metric
    if max_drop is None and unit_of(metric) != "points":
        raise InputError(f"--max-drop must be given: {metric} is in {unit_of(metric)}, no default fits.")
    return DeploymentRequest(names, split, 1.0 if max_drop is None else max_drop, batch)


def _deploy(
    study: tuple[StudyConfig, Storage],
    trials: Sequence[TrialRecord],
    options: Mapping[str, Any],
    staging: Path,
) -> Deployment:
    """Export the trials and compare their artifacts, all in folders of `staging`."""
    import torch

    from hpo.deploy.deployment import Place, deploy
    from hpo.device import limit_threads, probe_device

    config, database = study
    device = probe_device(options["device"] or "cpu")
    executor, _ = checkpoint_of(config, database, trials[0].number, device=options["device"] or "cpu")
    request = _request(config, executor.dataset, options)
    limit_threads(probe_device("cpu"))
    torch.set_num_threads(options["threads"] or torch.get_num_threads())
    candidates = _candidates(executor, study, trials, staging / EXPORTS)
    place = Place(device, staging / ARTIFACTS, RUNS / "cache" / "tokens")
    return deploy(config, executor.dataset, candidates, request, place)


def _candidates(
    executor: Executor, study: tuple[StudyConfig, Storage], trials: Sequence[TrialRecord], exports: Path
) -> Iterator[Candidate]:
    """The trials, each exported when its turn comes, and that removed after; one without weights is left out.

    Raises RunError where the first one has none.
    """
    import shutil

    from hpo.deploy.deployment import Candidate
    from hpo.trial.best_model import export_checkpoint
    from hpo.trial.provenance import TrialSource

    for trial in trials:
        _, checkpoint = checkpoint_of(*study, trial.number, executor)
        source = TrialSource(trial.number, trial.params, trial.telemetry)
        folder = exports / f"trial-{trial.number:05d}"
        try:
            exported = export_checkpoint(executor, checkpoint, folder, source, score_test=False)
        except RunError as error:
            if trial is trials[0]:
                raise
            _logger.warning("trial %d is left out: %s", trial.number, error)
            continue
        yield Candidate(trial.number, exported)
        shutil.rmtree(exported)


def _finish(stored: Mapping[str, Any], chosen: str, staging: Path, folder: Path, *, keep_all: bool) -> None:
    """Write the numbers, the chart and the page; keep the chosen artifact, or all of them."""
    import json
    import shutil

    from hpo.report.deployed import card_section, latency_charts
    from hpo.report.deployment_page import deployment_html
    from hpo.report.figures import png

    shutil.rmtree(staging / EXPORTS, ignore_errors=True)
    if keep_all:
        shutil.copytree(staging / ARTIFACTS / chosen, staging / MODEL)
    else:
        (staging / ARTIFACTS / chosen).rename(staging / MODEL)
        shutil.rmtree(staging / ARTIFACTS)
    with (staging / MODEL / "README.md").open("a", encoding="utf-8") as card:
        card.write(f"\n{card_section(stored)}")
    (staging / "deploy.json").write_text(json.dumps(stored, indent=2) + "\n")
    chart = next(one for one in latency_charts(stored) if one.key == f"latency_{stored['batch_size']}")
    (staging / "deploy.png").write_bytes(png(chart))
    (staging / "deploy.html").write_text(deployment_html(stored, str(folder / MODEL)), encoding="utf-8")
