"""Finds the artifact of a study's best models that is as good as fp32 and the fastest.

    make each artifact -> score it, refuse what loses too much -> mend int8 by layers in float
    -> time all in turn -> choose

All artifacts of all models are in memory while they are timed. One that cannot be made is left out, with the
reason; it does not end the others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hpo.config.study_config import StudyConfig
from hpo.data.dataset import DataSet
from hpo.data.examples import Example
from hpo.data.token_cache import load_tokenized
from hpo.deploy.artifacts import NAMES, REFERENCE, Artifact, artifacts_of
from hpo.deploy.drops import Scale, verdict_on
from hpo.deploy.float_layers import SearchLimits
from hpo.deploy.making import Workshop, calibration_texts, folder_bytes, weight_bytes
from hpo.deploy.mending import Mender
from hpo.deploy.result import DeployedArtifact, Deployment
from hpo.deploy.scoring import Answers, answers, largest_change
from hpo.deploy.timing import BATCH_SIZES, Effort, time_in_turn, timing
from hpo.device import DeviceInfo
from hpo.errors import HpoError, ModelError, RunError
from hpo.inference.model import TrainedModel
from hpo.trial.objectives import quality_objective

_logger = logging.getLogger("hpo.deploy")
_LIBRARIES = ("torch", "transformers", "onnxruntime")


@dataclass(frozen=True)
class DeploymentRequest:
    """What is asked for."""

    names: tuple[str, ...] = NAMES
    """Of the artifacts; fp32 is always there."""
    split: str = "test"
    max_drop: float = 1.0
    """More is refused: in points, of mae and rmse in the labels' units."""
    batch_size: int = 1
    """That whose latency decides, one of `timing.BATCH_SIZES`."""
    effort: Effort = field(default_factory=Effort)
    limits: SearchLimits = field(default_factory=SearchLimits)


@dataclass(frozen=True)
class Candidate:
    """One of the best trials, exported to a folder."""

    trial: int
    exported: Path


def deploy(
    study: StudyConfig,
    data: DataSet,
    candidates: Sequence[Candidate],
    device: DeviceInfo,
    request: DeploymentRequest,
    folder: Path,
) -> Deployment:
    """Make, score and time the artifacts of the `candidates`, the best first, each in a folder in `folder`.

    Uses as many threads as PyTorch has. Raises RunError where the fp32 of the best cannot be scored.
    """
    objective = quality_objective(study.objective)
    run = _Run(study, data, device, request, folder, Scale.of(objective))
    for candidate in candidates:
        run.add(candidate)
    run.time_all()
    return run.result()


class _Run:
    """A deployment under way."""

    def __init__(
        self,
        study: StudyConfig,
        data: DataSet,
        device: DeviceInfo,
        request: DeploymentRequest,
        folder: Path,
        scale: Scale,
    ) -> None:
        self._study, self._data, self._device = study, data, device
        self._request, self._folder, self._scale = request, folder, scale
        self._artifacts, self._left_out = artifacts_of(device, request.names)
        self._calibration = calibration_texts(data.splits["train"])
        self._best: Answers | None = None
        self._found: list[DeployedArtifact] = []
        self._models: list[TrainedModel] = []

    def add(self, candidate: Candidate) -> None:
        """Make and score the artifacts of one trial."""
        name = f"trial-{candidate.trial:05d}"
        workshop = Workshop(
            candidate.exported,
            self._folder / name,
            self._calibration,
            self._device.torch_device,
            trusted=self._study.model.trust_remote_code,
        )
        reference_model = workshop.load(REFERENCE)
        split = self._tokens(reference_model, self._request.split)
        reference = answers(reference_model, split)
        if reference is None:
            raise RunError(
                f"the logits of trial {candidate.trial} are not finite in fp32, so nothing compares."
            )
        self._best = self._best or reference
        mender = Mender(
            workshop, self._scale, self._request.max_drop, self._request.limits, self._probe(reference_model)
        )
        for artifact in self._artifacts:
            _logger.info("trial %d: making and scoring %s", candidate.trial, artifact.name)
            try:
                found, model = self._scored(candidate.trial, artifact, workshop, split, reference)
            except HpoError as error:
                if artifact == REFERENCE:
                    raise
                self._left_out = {**self._left_out, f"{artifact.name} of trial {candidate.trial}": str(error)}
                continue
            self._keep(found, model)
            if artifact.mode is not None and found.verdict != "as_good" and self._is_beyond(found):
                self._mend(found, mender, workshop, split, reference)

    def _is_beyond(self, found: DeployedArtifact) -> bool:
        return found.drop is None or found.drop.value > self._request.max_drop

    def _mend(
        self,
        broken: DeployedArtifact,
        mender: Mender,
        workshop: Workshop,
        split: Any,
        reference: Answers,
    ) -> None:
        _logger.info("trial %d: looking for the layers that break %s", broken.trial, broken.artifact.name)
        layers = mender.mend(broken.artifact)
        if layers is None:
            reason = "no set of its layers in float was found that mends it."
            self._found[-1] = replace(broken, reason=f"{broken.reason} {reason}")
            return
        mended = replace(broken.artifact, keep_float=layers.names)
        name = f"{mended.name}_mended"
        found, model = self._scored(broken.trial, mended, workshop, split, reference, name)
        self._keep(replace(found, mended=layers), model)

    def _keep(self, found: DeployedArtifact, model: TrainedModel) -> None:
        self._found.append(found)
        self._models.append(model)

    def _scored(
        self,
        trial: int,
        artifact: Artifact,
        workshop: Workshop,
        split: Any,
        reference: Answers,
        name: str | None = None,
    ) -> tuple[DeployedArtifact, TrainedModel]:
        model, folder = workshop.load(artifact, name), workshop.make(artifact, name)
        said, scale = answers(model, split), self._scale
        score = drop = behind = change = None
        metrics: Mapping[str, Any] = {}
        task_drops: Mapping[str, Any] = {}
        if said is not None:
            score, metrics = scale.scores(said)
            drop, task_drops = scale.drops(said, reference)
            assert self._best is not None
            behind, _ = scale.drops(said, self._best)
            change = largest_change(said, reference)
        verdict, reason = verdict_on(drop, self._request.max_drop, len(split.examples), scale.unit)
        if artifact == REFERENCE:
            verdict, reason = "as_good", ""
        return DeployedArtifact(
            trial=trial,
            artifact=artifact,
            folder=str(folder.relative_to(self._folder)),
            score=score,
            drop=drop,
            behind_best=behind,
            largest_change=change,
            metrics=metrics,
            task_drops=task_drops,
            verdict=verdict,
            reason=reason,
            weight_bytes=weight_bytes(folder),
            folder_bytes=folder_bytes(folder),
        ), model

    def time_all(self) -> None:
        """Time all artifacts in turn, the not finite ones left out."""
        rows = [_row(example) for example in self._data.splits[self._request.split]]
        finite = [number for number, found in enumerate(self._found) if found.score is not None]
        for size in BATCH_SIZES:
            _logger.info("timing %d artifacts, %d text%s a batch", len(finite), size, "s" * (size > 1))
            predict = {number: self._models[number].predict for number in finite}
            seconds = time_in_turn(predict, rows, size, self._request.effort)
            for number in finite:
                found = self._found[number]
                reference = next(
                    other
                    for other in finite
                    if self._found[other].trial == found.trial and self._found[other].artifact == REFERENCE
                )
                timed = timing(seconds[number], seconds[reference])
                self._found[number] = replace(found, timings={**found.timings, size: timed})

    def result(self) -> Deployment:
        """The artifacts, and the fastest of those that are as good as their own fp32 and the best trial's."""
        request, scale = self._request, self._scale
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
            device={"name": self._device.name, "features": sorted(self._device.cpu_features)},
            versions=_versions(),
            artifacts=tuple(self._found),
            chosen=chosen,
            left_out=self._left_out,
            notes=tuple(self._notes()),
        )

    def _notes(self) -> list[str]:
        if self._request.split == "test":
            return []
        return [
            "The split validation is also that by which the trial and its thresholds were chosen, so its scores "
            "flatter every artifact; the drops are of the same rows all the same."
        ]

    def _probe(self, model: TrainedModel) -> list[Example]:
        raise NotImplementedError

    def _tokens(self, model: TrainedModel, split: str) -> Any:
        cache = self._folder / "tokens"
        return load_tokenized(self._data, split, model.tokenizer, model.settings.windowing, cache)


def _row(example: Example) -> dict[str, Any]:
    """What `predict` takes."""
    return {"text": example.text} | ({"segments": example.segments} if example.segments else {})


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
