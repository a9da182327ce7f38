"""Finds the artifact of a study's best models that is as good as fp32 and the fastest.

    make each artifact -> score it, refuse what loses too much -> mend int8 by layers in float
    -> time all in turn -> choose

All artifacts of all models are in memory while they are timed. One that cannot be made or timed is left out,
with the reason; it does not end the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
from hpo.deploy.float_layers import FloatLayers, NothingFound
from hpo.deploy.making import Workshop, folder_bytes, weight_bytes
from hpo.deploy.mending import Mender
from hpo.deploy.request import DeploymentRequest
from hpo.deploy.result import DeployedArtifact, Deployment
from hpo.deploy.scoring import Answers, answers, depends_on_batch, largest_change
from hpo.deploy.timing import BATCH_SIZES, Rows, batches_untold, rows_of, time_in_turn, timing
from hpo.device import DeviceInfo
from hpo.errors import HpoError, RunError
from hpo.evaluation.intervals import Interval
from hpo.inference.model import TrainedModel
from hpo.non_inferiority import VerdictName
from hpo.trial.objectives import quality_objective
from hpo.versions import installed_versions

_logger = logging.getLogger("hpo.deploy")
_UNSEEN = 3
"""An event of probability p is with 95 % on at least one of 3 / p rows."""
_LIBRARIES = ("torch", "transformers", "onnxruntime")
_BY_CHANCE = 0.025
"""The part of 95 % intervals that lie below what they are of."""


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
    candidates: Iterable[Candidate],
    request: DeploymentRequest,
    place: Place,
) -> Deployment:
    """Make, score and time the artifacts of the `candidates`, the best first.

    The export of each may be gone when the next one is asked for. Uses as many threads as PyTorch has.
    Raises RunError where a model cannot be scored in fp32, and what ends its timing in fp32.
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
        self._best: _Model | None = None
        self._found: list[DeployedArtifact] = []
        self._models: list[TrainedModel] = []

    def add(self, candidate: Candidate) -> None:
        """Make and score the artifacts of one trial."""
        model = self._model(candidate)
        self._best = self._best or model
        mender = Mender(model.workshop, self._judged_on(), self._scale, self._request)
        is_behind = False
        for artifact in self._artifacts:
            _logger.info("trial %d: making and scoring %s", candidate.trial, artifact.name)
            try:
                found = self._score(model, artifact)
            except HpoError as error:
                if artifact == REFERENCE:
                    raise
                self._left_out[f"{artifact.name} of trial {candidate.trial}"] = str(error)
                continue
            if artifact == REFERENCE:
                is_behind = found.verdict != "as_good"
            own, _ = self._verdict_on(found.drop)
            if artifact.mode is not None and own != "as_good" and not is_behind:
                self._mend(model, found, mender, is_undecided=own == "undecided")

    def _verdict_on(self, drop: Interval | None) -> tuple[VerdictName, str]:
        rows = len(self._data.splits[self._request.split])
        return verdict_on(drop, self._request.max_drop, rows, self._scale.unit)

    def _verdict_of(self, drop: Interval, behind_best: Interval) -> tuple[VerdictName, str]:
        """That on its own fp32, and where that is as good, on the best trial's."""
        verdict, reason = self._verdict_on(drop)
        if verdict != "as_good":
            return verdict, reason
        assert self._best is not None
        verdict, reason = self._verdict_on(behind_best)
        return verdict, reason and f"against fp32 of trial {self._best.trial}, the best, {reason}"

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

    def _mend(self, model: _Model, broken: DeployedArtifact, mender: Mender, *, is_undecided: bool) -> None:
        _logger.info("trial %d: looking for the layers that break %s", model.trial, broken.artifact.name)
        try:
            layers = mender.mend(broken.artifact, is_undecided=is_undecided)
            if isinstance(layers, NothingFound):
                reason = layers.reason
            else:
                self._score(model, replace(broken.artifact, keep_float=layers.names), layers)
                return
        except HpoError as error:
            reason = f"It could not be mended: {error}"
        told = replace(broken, reason=f"{broken.reason} {reason}")
        self._found[self._found.index(broken)] = told

    def _score(
        self, model: _Model, artifact: Artifact, mended: FloatLayers | None = None
    ) -> DeployedArtifact:
        """Make, load and score an artifact, and keep it."""
        loaded, folder = model.workshop.load(artifact), model.workshop.make(artifact)
        said, scale = answers(loaded, model.split), self._scale
        quality: dict[str, Any] = {"verdict": "worse", "reason": NOT_FINITE}
        if said is not None:
            assert self._best is not None
            score, metrics = scale.scores(said)
            drop, task_drops = scale.drops(said, model.reference)
            behind_best = scale.drops(said, self._best.reference)[0]
            verdict, reason = self._verdict_of(drop, behind_best)
            batched = answers(loaded, model.split, in_batches=True) if depends_on_batch(loaded) else None
            quality = {
                "score": score,
                "metrics": metrics,
                "drop": drop,
                "task_drops": task_drops,
                "behind_best": behind_best,
                "largest_change": largest_change(said, model.reference),
                "batch_change": None if batched is None else largest_change(batched, said),
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
        """Time all artifacts in turn, the not finite ones left out. One that fails there is left out, too."""
        rows = rows_of(self._data.splits[self._request.split])
        finite = [number for number, found in enumerate(self._found) if found.score is not None]
        fp32 = {one.trial: number for number, one in enumerate(self._found) if one.artifact == REFERENCE}
        failed: dict[int, HpoError] = {}
        for size in BATCH_SIZES:
            _logger.info("timing %d artifacts, %d text%s a batch", len(finite), size, "s" * (size > 1))
            predict = {number: self._predict(number, failed) for number in finite if number not in failed}
            with batches_untold():
                seconds = time_in_turn(predict, rows, size, self._request.effort)
            for number in predict.keys() - failed.keys():
                found = self._found[number]
                timed = timing(seconds[number], seconds[fp32[found.trial]])
                self._found[number] = replace(found, timings={**found.timings, size: timed})
        for number, error in failed.items():
            found = self._found[number]
            name = f"{found.artifact.name} of trial {found.trial}"
            self._left_out[name] = f"it failed while it was timed: {error}"
        self._found = [found for number, found in enumerate(self._found) if number not in failed]

    def _predict(self, number: int, failed: dict[int, HpoError]) -> Callable[[Rows], object]:
        """What is timed of an artifact; it does nothing more once it has failed. fp32 raises."""

        def predict(rows: Rows) -> None:
            if number in failed:
                return
            try:
                self._models[number].predict(rows)
            except HpoError as error:
                if self._found[number].artifact == REFERENCE:
                    raise
                failed[number] = error

        return predict

    def result(self) -> Deployment:
        """The artifacts, and the fastest of those that are as good as their own fp32 and the best trial's."""
        request, scale, device = self._request, self._scale, self._place.device
        allowed = [number for number, found in enumerate(self._found) if found.verdict == "as_good"]
        chosen = min(allowed, key=lambda number: self._found[number].timings[request.batch_size].p50_ms)
        return Deployment(
            study=self._study.name,
            split=request.split,
            num_examples=len(self._data.splits[request.split]),
            objective=scale.metric,
            unit=scale.unit,
            max_drop=request.max_drop,
            batch_size=request.batch_size,
            num_threads=torch.get_num_threads(),
            device={"type": device.type, "name": device.name, "features": sorted(device.cpu_features)},
            versions=installed_versions(*_LIBRARIES),
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
        num_judged = sum(found.score is not None for found in self._found) - 1
        if num_judged > 1:
            chance = min(100.0, 100 * _BY_CHANCE * num_judged)
            notes.append(
                f"{num_judged} artifacts are judged beside fp32 of the best trial, each by its own 95 % "
                "interval: that one which loses more than --max-drop passes has a probability of at most "
                f"2.5 %, that any of them does of at most {chance:.3g} %."
            )
        changes = [found.batch_change for found in self._found if found.batch_change is not None]
        if changes:
            notes.append(
                "Dynamic int8 takes its ranges from each batch, so what stands beside a text moves its "
                f"probabilities, here by up to {max(changes):.2g} between texts alone, which are scored, and "
                "in batches."
            )
        return notes
