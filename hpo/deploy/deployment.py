"""Finds the fastest form of a study's best model that is as good as fp32.

    build each form -> score it on validation -> time all in turn -> choose -> score the chosen one on test

Validation chooses. The test split is used once, and a form that is worse there is not deployed. A form that
cannot be built, scored in time or timed is left out with the reason.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from hpo.config.study_config import StudyConfig
from hpo.data.dataset import DataSet
from hpo.data.token_cache import load_tokenized
from hpo.deploy.accuracy import judge_form, limit, split_statistics
from hpo.deploy.artifacts import NAMES, REFERENCE, ArtifactBuilder, possible_forms, weight_bytes
from hpo.deploy.result import Confirmation, DeployedArtifact, Deployment, Judged
from hpo.deploy.timing import BATCH_SIZES, Rows, TimingBudget, rows_of, time_in_turn, timing
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
    """The forms to try, and the rule to choose by."""

    names: tuple[str, ...] = NAMES
    """Forms to try; fp32 is always there."""
    max_drop: float = 1.0
    """Limit of the loss, in points; in the labels' units for mae and rmse."""
    batch_size: int = 1
    """Texts in a batch whose latency decides, one of `timing.BATCH_SIZES`."""
    has_test: bool = True
    """True if the test split has labels for the objective."""
    budget: TimingBudget = field(default_factory=TimingBudget)
    stop_reason: Callable[[], str] = lambda: ""
    """Why to begin no other form and to cut the timing short. Empty: go on."""


@dataclass(frozen=True)
class DeployTarget:
    """The device that forms are built for, and the folders to use."""

    device: DeviceInfo
    folder: Path
    """Gets a subfolder for each form, by name."""
    token_cache: Path


def deploy(
    study: StudyConfig, data: DataSet, exported: Path, request: DeploymentRequest, target: DeployTarget
) -> Deployment:
    """Build, score and time the forms of the model in `exported`, and choose one.

    Uses PyTorch's number of threads. Raises RunError if fp32 cannot be scored or timed, and Preempted if the
    search stops before fp32 is scored.
    """
    run = _Run(study, data, exported, request, target)
    run.score_all()
    run.time_all()
    return run.result()


class _Run:
    """State of a deployment."""

    def __init__(
        self,
        study: StudyConfig,
        data: DataSet,
        exported: Path,
        request: DeploymentRequest,
        target: DeployTarget,
    ) -> None:
        self._study, self._data, self._request, self._target = study, data, request, target
        self._provenance = read_metadata(exported)["provenance"]
        self._metric = quality_objective(study.objective).metric
        self._names, self._left_out = possible_forms(target.device, request.names)
        self._limit = limit(self._question("a form", CHOSEN_BY), data, CHOSEN_BY)
        if self._limit and len(self._names) > 1:
            _logger.warning("No form can be shown to be as good. %s", self._limit)
        self._builder = ArtifactBuilder(
            exported,
            target.folder,
            target.device.torch_device,
            trust_remote_code=study.model.trust_remote_code,
        )
        self._references: dict[str, Statistics] = {}
        self._forms: dict[str, DeployedArtifact] = {}
        self._models: dict[str, TrainedModel] = {}
        self._num_rounds = 0

    def _question(self, form: str, split: str) -> Question:
        return Question(self._metric, self._request.max_drop, REFERENCE, form, f"rows of {split}")

    def score_all(self) -> None:
        for name in self._names:
            try:
                self._check_stop()
                _logger.info("making and scoring %s", name)
                self._models[name] = self._builder.load(name)
                judged = self._judge(name, CHOSEN_BY)
                self._forms[name] = DeployedArtifact(name, judged, weight_bytes(self._builder.build(name)))
            except HpoError as error:
                if name == REFERENCE:
                    raise
                self._left_out[name] = str(error)

    def _check_stop(self) -> None:
        if reason := self._request.stop_reason():
            raise Preempted(f"not scored, because {reason}.")

    def _judge(self, name: str, split: str) -> Judged:
        if split not in self._references:
            fp32 = self._statistics(REFERENCE, split)
            if fp32 is None:
                number = self._provenance["trial"]
                raise RunError(f"the logits of trial {number} are not finite in fp32, so nothing compares.")
            self._references[split] = fp32
        reference = self._references[split]
        statistics = reference if name == REFERENCE else self._statistics(name, split)
        judged = judge_form(self._question(name, split), statistics, reference)
        # A note says the limit of the rows, so the reason of a form leaves it out.
        text, _, limit = judged.reason.partition(". With ")
        has_note = split == CHOSEN_BY and self._limit and limit
        return replace(judged, reason=f"{text}.") if has_note else judged

    def _statistics(self, name: str, split: str) -> Statistics | None:
        model = self._models[name]
        tokens = load_tokenized(
            self._data, split, model.tokenizer, model.settings.windowing, self._target.token_cache
        )
        may_stop = split == CHOSEN_BY
        return split_statistics(model, tokens, lambda _: self._check_stop() if may_stop else None)

    def time_all(self) -> None:
        """Time the forms with finite logits in turn, and leave out those that fail."""
        rows = rows_of(self._data.splits[CHOSEN_BY])
        finite = [name for name, form in self._forms.items() if form.judged.score is not None]
        failed: dict[str, HpoError] = {}
        for size in BATCH_SIZES:
            _logger.info("timing %d forms, %d text%s a batch", len(finite), size, "s" * (size > 1))
            predict = {name: self._predict(name, failed) for name in finite if name not in failed}
            with _muted_inference():
                seconds = time_in_turn(predict, rows, size, self._request.budget, self._request.stop_reason)
            self._num_rounds = len(seconds[REFERENCE])
            for name in predict.keys() - failed.keys():
                form, timed = self._forms[name], timing(seconds[name], seconds[REFERENCE])
                self._forms[name] = replace(form, timings={**form.timings, size: timed})
        for name, error in failed.items():
            self._left_out[name] = f"it failed while it was timed: {error}"
            del self._forms[name]

    def _predict(self, name: str, failed: dict[str, HpoError]) -> Callable[[Rows], object]:
        """Return the call to time. After an error of a form, its call does nothing; fp32 raises."""

        def predict(rows: Rows) -> None:
            if name in failed:
                return
            try:
                self._models[name].predict(rows)
            except HpoError as error:
                if name == REFERENCE:
                    raise
                failed[name] = error

        return predict

    def result(self) -> Deployment:
        request, device = self._request, self._target.device
        as_good = [name for name, form in self._forms.items() if form.judged.verdict == "as_good"]
        chosen = min(as_good, key=self._latency, default=REFERENCE)
        test, notes = None, self._notes()
        if request.has_test:
            test = self._confirm(chosen)
            if test.judged.verdict == "worse":
                notes.insert(0, f"{chosen} was chosen, but it is worse on test, so fp32 is deployed.")
                chosen, test = REFERENCE, self._confirm(REFERENCE)
        return Deployment(
            study=self._study.name,
            trial=self._provenance["trial"],
            num_examples=self._forms[REFERENCE].judged.num_rows,
            objective=self._metric,
            unit=self._question("", CHOSEN_BY).unit,
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

    def _confirm(self, name: str) -> Confirmation:
        fp32_score = self._judge(REFERENCE, CONFIRMED_BY).score
        assert fp32_score is not None
        judged = self._judge(name, CONFIRMED_BY)
        return Confirmation(judged.num_rows, fp32_score, judged)

    def _notes(self) -> list[str]:
        notes = []
        if others := len(self._forms) - 1:
            question, percent = self._question("", CHOSEN_BY), 100 * ALPHA
            any_form = f", and any of {others} with at most {min(100.0, percent * others):.3g} %"
            if self._limit:
                notes.append(f"No form can be shown to be as good. {self._limit}")
            notes.append(
                f"A form that loses {question.margin:g} {question.unit} or more on new rows is called as "
                f"good with a probability of at most {percent:g} %{any_form if others > 1 else ''}."
            )
        if self._num_rounds < self._request.budget.rounds:
            notes.append(f"Timed in {self._num_rounds} of {self._request.budget.rounds} rounds.")
        base = self._provenance["settings"].get("base_precision", "fp32")
        if base != "fp32":
            notes.append(
                f"The weights under the adapter were {base} in training. Every form has them decoded, with "
                "the adapter added: fp32 has the weights of the trial, and is as large as any model in fp32."
            )
        if not self._request.has_test:
            notes.append("No test split has labels, so only the rows that chose the form speak for it.")
        if any(self._models[name].precision == "int8" for name in self._forms):
            notes.append(
                "int8 takes the ranges of activations from each batch, so the other texts of a batch change "
                "its probabilities. Its score is that of texts predicted alone."
            )
        return notes


@contextmanager
def _muted_inference() -> Iterator[None]:
    """Hide the warnings about cut texts, which `predict` repeats in each batch."""
    logger = logging.getLogger("hpo.inference")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
