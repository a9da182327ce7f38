"""Finds the fastest form of a study's best model that is as good as fp32.

    make each form -> score it on validation -> time all in turn -> choose -> score the chosen one on test

Validation chooses. The test split is used once, and a form that is worse there is not deployed. A form that
cannot be made, scored in time or timed is left out with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from hpo.config.study_config import StudyConfig
from hpo.data.dataset import DataSet
from hpo.data.token_cache import load_tokenized
from hpo.deploy.artifacts import NAMES, REFERENCE, artifacts_of
from hpo.deploy.judging import judge_form, limit
from hpo.deploy.making import Workshop, weight_bytes
from hpo.deploy.result import Confirmation, DeployedArtifact, Deployment, Judged
from hpo.deploy.scoring import depends_on_batch, split_statistics
from hpo.deploy.timing import BATCH_SIZES, Effort, Rows, batches_untold, rows_of, time_in_turn, timing
from hpo.device import DeviceInfo
from hpo.errors import HpoError, Preempted, RunError
from hpo.evaluation.contributions import Statistics
from hpo.evaluation.decision import ALPHA
from hpo.evaluation.verdict import Question
from hpo.inference.model import TrainedModel
from hpo.models.export import read_metadata
from hpo.trial.objectives import quality_objective
from hpo.versions import installed_versions

CHOSEN_BY, CONFIRMED_BY = "validation", "test"
_logger = logging.getLogger("hpo.deploy")
_LIBRARIES = ("torch", "transformers", "onnxruntime")


@dataclass(frozen=True)
class DeploymentRequest:
    """What is asked for."""

    names: tuple[str, ...] = NAMES
    """Of the artifacts; fp32 is always there."""
    max_drop: float = 1.0
    """More is refused: in points, of mae and rmse in the labels' units."""
    batch_size: int = 1
    """That whose latency decides, one of `timing.BATCH_SIZES`."""
    has_test: bool = True
    """Whether the test split has labels for the objective."""
    effort: Effort = field(default_factory=Effort)
    ends: Callable[[], str] = lambda: ""
    """Why no further form is begun, and the timing is short; empty: go on."""


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
    """Gets a folder for each artifact, of its name."""
    token_cache: Path


def deploy(
    study: StudyConfig, data: DataSet, candidate: Candidate, request: DeploymentRequest, place: Place
) -> Deployment:
    """Make, score and time the forms of the `candidate`, and choose.

    Uses as many threads as PyTorch has. Raises RunError where the model cannot be scored in fp32, what ends
    its timing in fp32, and Preempted where it is to end before fp32 is scored.
    """
    run = _Run(study, data, candidate, request, place)
    run.score_all()
    run.time_all()
    return run.result()


class _Run:
    """A deployment under way."""

    def __init__(
        self,
        study: StudyConfig,
        data: DataSet,
        candidate: Candidate,
        request: DeploymentRequest,
        place: Place,
    ) -> None:
        self._study, self._data, self._request, self._place = study, data, request, place
        self._trial, self._exported = candidate.trial, candidate.exported
        self._metric = quality_objective(study.objective).metric
        self._artifacts, self._left_out = artifacts_of(place.device, request.names)
        self._limit = limit(self._question("a form", CHOSEN_BY), data, CHOSEN_BY)
        if self._limit and len(self._artifacts) > 1:
            _logger.warning("No form can be shown to be as good. %s", self._limit)
        self._workshop = Workshop(
            candidate.exported,
            place.folder,
            data.splits["train"],
            place.device.torch_device,
            trusted=study.model.trust_remote_code,
        )
        self._references: dict[str, Statistics] = {}
        self._forms: dict[str, DeployedArtifact] = {}
        self._models: dict[str, TrainedModel] = {}
        self._num_rounds = 0

    def _question(self, form: str, split: str) -> Question:
        return Question(self._metric, self._request.max_drop, "fp32", form, f"rows of {split}")

    def score_all(self) -> None:
        for artifact in self._artifacts:
            try:
                self._leave_if_asked()
                _logger.info("making and scoring %s", artifact.name)
                self._models[artifact.name] = self._workshop.load(artifact)
                self._forms[artifact.name] = DeployedArtifact(
                    artifact.name,
                    self._judged(artifact.name, CHOSEN_BY),
                    weight_bytes(self._workshop.make(artifact)),
                )
            except HpoError as error:
                if artifact == REFERENCE:
                    raise
                self._left_out[artifact.name] = str(error)

    def _leave_if_asked(self) -> None:
        if reason := self._request.ends():
            raise Preempted(f"not scored, because {reason}.")

    def _reference(self, split: str) -> Statistics:
        """The statistics of fp32 on a split. Raises RunError where its logits are not finite."""
        if split not in self._references:
            found = self._statistics(REFERENCE.name, split)
            if found is None:
                raise RunError(
                    f"the logits of trial {self._trial} are not finite in fp32, so nothing compares."
                )
            self._references[split] = found
        return self._references[split]

    def _statistics(self, name: str, split: str) -> Statistics | None:
        model, cache = self._models[name], self._place.token_cache
        tokens = load_tokenized(self._data, split, model.tokenizer, model.settings.windowing, cache)
        on_batch = self._leave_if_asked if split == CHOSEN_BY else lambda: None
        return split_statistics(model, tokens, on_batch)

    def _judged(self, name: str, split: str) -> Judged:
        reference = self._reference(split)
        found = reference if name == REFERENCE.name else self._statistics(name, split)
        return judge_form(self._question(name, split), found, reference)

    def time_all(self) -> None:
        """Time all forms in turn, the not finite ones left out. One that fails there is left out, too."""
        rows = rows_of(self._data.splits[CHOSEN_BY])
        finite = [name for name, form in self._forms.items() if form.judged.score is not None]
        failed: dict[str, HpoError] = {}
        for size in BATCH_SIZES:
            _logger.info("timing %d forms, %d text%s a batch", len(finite), size, "s" * (size > 1))
            predict = {name: self._predict(name, failed) for name in finite if name not in failed}
            with batches_untold():
                seconds = time_in_turn(predict, rows, size, self._request.effort, self._request.ends)
            for name in predict.keys() - failed.keys():
                timed = timing(seconds[name], seconds[REFERENCE.name])
                self._num_rounds = len(seconds[name])
                form = self._forms[name]
                self._forms[name] = replace(form, timings={**form.timings, size: timed})
        for name, error in failed.items():
            self._left_out[name] = f"it failed while it was timed: {error}"
            del self._forms[name]

    def _predict(self, name: str, failed: dict[str, HpoError]) -> Callable[[Rows], object]:
        """What is timed of a form; it does nothing more once it has failed. fp32 raises."""

        def predict(rows: Rows) -> None:
            if name in failed:
                return
            try:
                self._models[name].predict(rows)
            except HpoError as error:
                if name == REFERENCE.name:
                    raise
                failed[name] = error

        return predict

    def result(self) -> Deployment:
        """The forms, and the fastest of those that are as good."""
        request, device = self._request, self._place.device
        question = self._question("", CHOSEN_BY)
        allowed = [name for name, form in self._forms.items() if form.judged.verdict == "as_good"]
        fastest = min(allowed, key=self._latency, default=REFERENCE.name)
        chosen, test, notes = fastest, None, self._notes()
        if request.has_test:
            test = self._confirmed(fastest)
            if test.judged.verdict == "worse":
                chosen, test = REFERENCE.name, self._confirmed(REFERENCE.name)
                notes.insert(0, f"{fastest} was chosen, but it is worse on test, so fp32 is deployed.")
        return Deployment(
            study=self._study.name,
            trial=self._trial,
            num_examples=self._forms[REFERENCE.name].judged.num_rows,
            objective=question.metric,
            unit=question.unit,
            max_drop=request.max_drop,
            batch_size=request.batch_size,
            num_threads=torch.get_num_threads(),
            device={"type": device.type, "name": device.name, "features": sorted(device.cpu_features)},
            versions=installed_versions(*_LIBRARIES),
            artifacts=tuple(self._forms.values()),
            chosen=list(self._forms).index(chosen),
            test=test,
            left_out=self._left_out,
            notes=tuple(notes),
        )

    def _latency(self, name: str) -> float:
        return self._forms[name].timings[self._request.batch_size].p50_ms

    def _confirmed(self, name: str) -> Confirmation:
        fp32_score = self._judged(REFERENCE.name, CONFIRMED_BY).score
        assert fp32_score is not None
        judged = self._judged(name, CONFIRMED_BY)
        return Confirmation(judged.num_rows, fp32_score, judged)

    def _notes(self) -> list[str]:
        others = len(self._forms) - 1
        chance = min(100.0, 100 * ALPHA * others)
        asked = self._question("", CHOSEN_BY)
        several = f", and any of {others} with at most {chance:.3g} %" if others > 1 else ""
        error = (
            f"A form that loses {asked.margin:g} {asked.unit} or more on new rows is called as good with a "
            f"probability of at most {100 * ALPHA:g} %{several}."
        )
        limits = [f"No form can be shown to be as good. {self._limit}"] if self._limit else []
        notes = [*limits, error] if others else []
        if self._num_rounds < self._request.effort.rounds:
            notes.append(f"Timed in {self._num_rounds} of {self._request.effort.rounds} rounds.")
        base = read_metadata(self._exported)["provenance"]["settings"].get("base_precision", "fp32")
        if base != "fp32":
            notes.append(
                f"The weights under the adapter were {base} in training. Every form has them decoded, with "
                "the adapter added: fp32 has the weights of the trial, and is as large as any model in fp32."
            )
        if not self._request.has_test:
            notes.append("No test split has labels, so only the rows that chose the form speak for it.")
        if any(depends_on_batch(self._models[name]) for name in self._forms):
            notes.append(
                "Dynamic int8 takes its ranges from each batch, so the other texts of a batch change its "
                "probabilities. Its score is that of texts predicted alone."
            )
        return notes
