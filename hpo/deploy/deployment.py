"""Finds the artifact of a study's best models that is as good as fp32 and the fastest.

    make each artifact -> score it, refuse what loses too much -> mend int8 by layers in float
    -> time all in turn -> choose

All artifacts of all models are in memory while they are timed. One that cannot be made is left out, with the
reason; it does not end the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hpo.config.study_config import StudyConfig
from hpo.data.dataset import DataSet
from hpo.data.examples import Example
from hpo.data.token_cache import load_tokenized
from hpo.data.tokenized_split import TokenizedSplit
from hpo.deploy.artifacts import REFERENCE, Artifact, artifacts_of
from hpo.deploy.drops import NOT_FINITE, Scale, verdict_on
from hpo.deploy.float_layers import FloatLayers
from hpo.deploy.making import Workshop, folder_bytes, weight_bytes
from hpo.deploy.mending import Mender
from hpo.deploy.request import DeploymentRequest
from hpo.deploy.result import DeployedArtifact, Deployment
from hpo.deploy.scoring import Answers, answers, largest_change
from hpo.deploy.timing import BATCH_SIZES, batches_untold, rows_of, time_in_turn, timing
from hpo.device import DeviceInfo
from hpo.errors import HpoError, RunError
from hpo.inference.model import TrainedModel
from hpo.trial.objectives import quality_objective

_logger = logging.getLogger("hpo.deploy")
_UNSEEN = 3
"""An event of probability p is with 95 % on at least one of 3 / p rows."""
_LIBRARIES = ("torch", "transformers", "onnxruntime")


@dataclass(frozen=True)
class Candidate:
    """One of the best trials, exported to a folder."""

    trial: int
    exported: Path


@dataclass(frozen=True)
class Place:
    """Where a deployment is made, and what it is made for."""

    device: DeviceInfo
    folder: Path
    """Gets a folder for each artifact."""
    token_cache: Path


def deploy(
    study: StudyConfig,
    data: DataSet,
    candidates: Sequence[Candidate],
    request: DeploymentRequest,
    place: Place,
) -> Deployment:
    """Make, score and time the artifacts of the `candidates`, the best first.

    Uses as many threads as PyTorch has. Raises RunError where a model cannot be scored in fp32.
    """
    run = _Run(study, data, request, place)
    for candidate in candidates:
        run.add(candidate)
    run.time_all()
    return run.result()


@dataclass(frozen=True)
class _Model:
    """A candidate's model, and what its fp32 says of the split."""

    trial: int
    workshop: Workshop
    split: TokenizedSplit
    reference: Answers


class _Run:
    """A deployment under way."""

    def __init__(self, study: StudyConfig, data: DataSet, request: DeploymentRequest, place: Place) -> None:
        self._study, self._data, self._request, self._place = study, data, request, place
        self._scale = Scale.of(quality_objective(study.objective))
        artifacts, left_out = artifacts_of(place.device, request.names)
        self._artifacts, self._left_out = artifacts, dict(left_out)
        self._best: Answers | None = None
        self._found: list[DeployedArtifact] = []
        self._models: list[TrainedModel] = []

    def add(self, candidate: Candidate) -> None:
        """Make and score the artifacts of one trial."""
        model = self._model(candidate)
        self._best = self._best or model.reference
        mender = Mender(model.workshop, self._judged_on(), self._scale, self._request)
        for artifact in self._artifacts:
            _logger.info("trial %d: making and scoring %s", candidate.trial, artifact.name)
            try:
                found = self._score(model, artifact)
                if artifact.mode is not None and self._loses_too_much(found):
                    self._mend(model, found, mender)
            except HpoError as error:
                if artifact == REFERENCE:
                    raise
                self._left_out[f"{artifact.name} of trial {candidate.trial}"] = str(error)

    def _loses_too_much(self, found: DeployedArtifact) -> bool:
        """Whether it seems so: what is undecided may be either."""
        return found.drop is None or found.drop.value > self._request.max_drop

    def _model(self, candidate: Candidate) -> _Model:
        place = self._place
        workshop = Workshop(
            candidate.exported,
            place.folder / f"trial-{candidate.trial:05d}",
            self._data.splits["train"],
            place.device.torch_device,
            trusted=self._study.model.trust_remote_code,
        )
        fp32 = workshop.load(REFERENCE)
        windowing, cache = fp32.settings.windowing, place.token_cache
        split = load_tokenized(self._data, self._request.split, fp32.tokenizer, windowing, cache)
        reference = answers(fp32, split)
        if reference is None:
            raise RunError(
                f"the logits of trial {candidate.trial} are not finite in fp32, so nothing compares."
            )
        return _Model(candidate.trial, workshop, split, reference)

    def _judged_on(self) -> Sequence[Example]:
        """The rows by which layers in float are found: of a split on which nothing is reported."""
        return self._data.splits["train" if self._request.split == "validation" else "validation"]

    def _mend(self, model: _Model, broken: DeployedArtifact, mender: Mender) -> None:
        _logger.info("trial %d: looking for the layers that break %s", model.trial, broken.artifact.name)
        layers = mender.mend(broken.artifact)
        if layers is None:
            reason = f"{broken.reason} No set of its layers in float was found that mends it."
            self._found[self._found.index(broken)] = replace(broken, reason=reason)
        else:
            self._score(model, replace(broken.artifact, keep_float=layers.names), layers)

    def _score(
        self, model: _Model, artifact: Artifact, mended: FloatLayers | None = None
    ) -> DeployedArtifact:
        """Make, load and score an artifact, and keep it."""
        loaded, folder = model.workshop.load(artifact), model.workshop.make(artifact)
        said, scale, rows = answers(loaded, model.split), self._scale, len(model.split.examples)
        quality: dict[str, Any] = {"verdict": "worse", "reason": NOT_FINITE}
        if said is not None:
            assert self._best is not None
            score, metrics = scale.scores(said)
            drop, task_drops = scale.drops(said, model.reference)
            verdict, reason = verdict_on(drop, self._request.max_drop, rows, scale.unit)
            quality = {
                "score": score,
                "metrics": metrics,
                "drop": drop,
                "task_drops": task_drops,
                "behind_best": scale.drops(said, self._best)[0],
                "largest_change": largest_change(said, model.reference),
                "verdict": verdict,
                "reason": reason,
            }
        found = DeployedArtifact(
            trial=model.trial,
            artifact=artifact,
            folder=str(folder.relative_to(self._place.folder)),
            weight_bytes=weight_bytes(folder),
            folder_bytes=folder_bytes(folder),
            mended=mended,
            **quality,
        )
        self._found.append(found)
        self._models.append(loaded)
        return found

    def time_all(self) -> None:
        """Time all artifacts in turn, the not finite ones left out."""
        rows = rows_of(self._data.splits[self._request.split])
        finite = [number for number, found in enumerate(self._found) if found.score is not None]
        fp32 = {one.trial: number for number, one in enumerate(self._found) if one.artifact == REFERENCE}
        for size in BATCH_SIZES:
            _logger.info("timing %d artifacts, %d text%s a batch", len(finite), size, "s" * (size > 1))
            predict = {number: self._models[number].predict for number in finite}
            with batches_untold():
                seconds = time_in_turn(predict, rows, size, self._request.effort)
            for number in finite:
                found = self._found[number]
                timed = timing(seconds[number], seconds[fp32[found.trial]])
                self._found[number] = replace(found, timings={**found.timings, size: timed})

    def result(self) -> Deployment:
        """The artifacts, and the fastest of those that are as good as their own fp32 and the best trial's."""
        request, scale, device = self._request, self._scale, self._place.device
        num_rows = len(self._data.splits[request.split])
        allowed = [
            number
            for number, found in enumerate(self._found)
            if found.verdict == "as_good"
            and verdict_on(found.behind_best, request.max_drop, num_rows, scale.unit)[0] == "as_good"
        ]
        chosen = min(allowed, key=lambda number: self._found[number].timings[request.batch_size].p50_ms)
        return Deployment(
            study=self._study.name,
            split=request.split,
            num_examples=num_rows,
            objective=scale.metric,
            unit=scale.unit,
            max_drop=request.max_drop,
            batch_size=request.batch_size,
            num_threads=torch.get_num_threads(),
            device={"name": device.name, "features": sorted(device.cpu_features)},
            versions=_versions(),
            artifacts=tuple(self._found),
            chosen=chosen,
            left_out=self._left_out,
            notes=tuple(self._notes()),
        )

    def _notes(self) -> list[str]:
        rows, points = len(self._data.splits[self._request.split]), self._request.max_drop
        notes = []
        if self._request.split == "validation":
            notes.append(
                "The trial and its thresholds were chosen by the split validation too, so the scores on it "
                "flatter every artifact; the drops are paired all the same."
            )
        if self._scale.unit == "points" and rows < _UNSEEN * 100 / points:
            notes.append(
                f"{rows} rows are few: what happens to less than {100 * _UNSEEN / rows:.2g} % of texts may "
                f"be on none of them, and --max-drop is {points:g}."
            )
        return notes


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
