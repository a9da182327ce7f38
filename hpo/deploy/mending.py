"""Mends a model that int8 ruins: by layers left in float, none of which can be left out.

A set of them is judged on the rows of a split beside the one that is reported, by the verdict that it must
have there. On few rows a handful of changed predictions is a large drop and would refuse every set, so it is
all rows, or as many as can be judged in `JUDGING_SECONDS`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpo.data.examples import Example
from hpo.data.tokenization import tokenize_chunks
from hpo.data.tokenized_split import TokenizedSplit
from hpo.deploy.artifacts import Artifact
from hpo.deploy.drops import Scale, verdict_on
from hpo.deploy.float_layers import FloatLayers, FloatLayersSearch, NothingFound
from hpo.deploy.making import ONNX_REFERENCE, Workshop
from hpo.deploy.quantize import layers
from hpo.deploy.request import DeploymentRequest
from hpo.deploy.scoring import Answers, answers, logits_error
from hpo.inference.model import TrainedModel
from hpo.trial.smallest_set import Names

LEAST_JUDGED_ROWS, MOST_JUDGED_ROWS = 512, 10_000
JUDGING_SECONDS = 10.0
"""Of one set, as the model in fp32 takes them; `LEAST_JUDGED_ROWS` may take longer."""
UNDECIDED_TRIES = 12
"""Sets that are asked for where the drop of int8 may be none, so that there may be nothing to find."""
RANKING_ROWS = 64
"""On so many the error of each layer is measured."""


@dataclass(frozen=True)
class _Judging:
    """What the model in fp32 says of the rows that int8 is compared on."""

    ranking: Answers
    judged: Answers


class Mender:
    """Mends the artifacts of one model, judged on some of `examples`."""

    def __init__(
        self, workshop: Workshop, examples: Sequence[Example], scale: Scale, request: DeploymentRequest
    ) -> None:
        self._workshop, self._examples, self._scale, self._request = workshop, examples, scale, request
        self._search: FloatLayersSearch | None = None
        self._judging: _Judging | None = None

    def mend(self, broken: Artifact, *, is_undecided: bool = False) -> FloatLayers | NothingFound:
        """Layers that have to be in float, or why none were found.

        Where it `is_undecided` whether int8 loses too much, fewer sets are tried.
        """
        found = layers(self._workshop.make(ONNX_REFERENCE))
        sizes = {layer.name: layer.num_weights for layer in found}
        self._search = self._search or FloatLayersSearch(sizes, self._request.limits)
        judging = self._judging or self._rows()
        if judging is None:
            return NothingFound("The ONNX graph in fp32 is not finite, so no layers were searched for.")
        self._judging = judging

        def error_of(name: str) -> float:
            others = tuple(other for other in sizes if other != name)
            return logits_error(self._answers(broken, others, judging.ranking.split), judging.ranking)

        def is_ok(keep: Names) -> bool:
            reference, unit = judging.judged, self._scale.unit
            said = self._answers(broken, keep, reference.split)
            drop = None if said is None else self._scale.drops(said, reference)[0]
            num_rows = len(reference.split.examples)
            return verdict_on(drop, self._request.max_drop, num_rows, unit)[0] == "as_good"

        return self._search.search(error_of, is_ok, tries=UNDECIDED_TRIES if is_undecided else None)

    def _rows(self) -> _Judging | None:
        """What int8 is compared with; None: not finite."""
        plain = self._workshop.load(ONNX_REFERENCE)
        split = self._tokens(plain, RANKING_ROWS)
        answers(plain, split)  # the first call is slow
        started = time.perf_counter()
        ranking = answers(plain, split)
        seconds = (time.perf_counter() - started) / len(split.examples)
        num_rows = min(max(LEAST_JUDGED_ROWS, int(JUDGING_SECONDS / seconds)), MOST_JUDGED_ROWS)
        judged = answers(plain, self._tokens(plain, num_rows))
        return None if ranking is None or judged is None else _Judging(ranking, judged)

    def _tokens(self, model: TrainedModel, num_rows: int) -> TokenizedSplit:
        drawn = _drawn(self._examples, num_rows)
        return next(iter(tokenize_chunks(drawn, model.tasks, model.tokenizer, model.settings.windowing)))

    def _answers(self, broken: Artifact, keep: Names, split: TokenizedSplit) -> Answers | None:
        tried = replace(broken, keep_float=keep)
        try:
            return answers(self._workshop.load(tried), split)
        finally:
            if keep:
                self._workshop.remove(tried)


def _drawn(examples: Sequence[Example], num: int) -> list[Example]:
    """At most so many of a split, in its order, drawn with a fixed seed."""
    drawn = random.Random(0).sample(range(len(examples)), min(num, len(examples)))
    return [examples[index] for index in sorted(drawn)]
