"""Mends a model that int8 ruins: by the fewest layers left in float."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hpo.data.examples import Example
from hpo.data.tokenization import tokenize_chunks
from hpo.data.tokenized_split import TokenizedSplit
from hpo.deploy.artifacts import Artifact
from hpo.deploy.drops import Scale, verdict_on
from hpo.deploy.float_layers import FloatLayers, FloatLayersSearch
from hpo.deploy.making import ONNX_REFERENCE, Workshop
from hpo.deploy.quantize import layers
from hpo.deploy.request import DeploymentRequest
from hpo.deploy.scoring import Answers, answers, logits_error
from hpo.trial.smallest_set import Names

JUDGED_ROWS = 512
"""On so many a set of layers in float is judged, by the verdict that it must have on the test split."""
RANKING_ROWS = 64
"""On so many the error of each layer is measured."""


class Mender:
    """Mends the artifacts of one model, judged on some of `examples`."""

    def __init__(
        self, workshop: Workshop, examples: Sequence[Example], scale: Scale, request: DeploymentRequest
    ) -> None:
        self._workshop, self._examples, self._scale, self._request = workshop, examples, scale, request
        self._search: FloatLayersSearch | None = None

    def mend(self, broken: Artifact) -> FloatLayers | None:
        """The fewest layers that have to be in float; None where no set of them was found."""
        found = layers(self._workshop.make(ONNX_REFERENCE))
        sizes = {layer.name: layer.num_weights for layer in found}
        self._search = self._search or FloatLayersSearch(sizes, self._request.limits)
        judged, ranking = self._tokens(JUDGED_ROWS), self._tokens(RANKING_ROWS)
        plain = self._workshop.load(ONNX_REFERENCE)
        reference, exact = answers(plain, judged), answers(plain, ranking)
        if reference is None or exact is None:
            return None

        def error_of(name: str) -> float:
            others = tuple(other for other in sizes if other != name)
            return logits_error(self._answers(broken, others, ranking), exact)

        def is_ok(keep: Names) -> bool:
            said, unit = self._answers(broken, keep, judged), self._scale.unit
            drop = None if said is None else self._scale.drops(said, reference)[0]
            return verdict_on(drop, self._request.max_drop, len(judged.examples), unit)[0] == "as_good"

        return self._search.search(error_of, is_ok)

    def _tokens(self, num_rows: int) -> TokenizedSplit:
        model = self._workshop.load(ONNX_REFERENCE)
        drawn = _drawn(self._examples, num_rows)
        return next(iter(tokenize_chunks(drawn, model.tasks, model.tokenizer, model.settings.windowing)))

    def _answers(self, broken: Artifact, keep: Names, split: TokenizedSplit) -> Answers | None:
        tried = replace(broken, keep_float=keep)
        try:
            return answers(self._workshop.load(tried), split)
        finally:
            self._workshop.remove(tried)


def _drawn(examples: Sequence[Example], num: int) -> list[Example]:
    """At most so many of a split, in its order, drawn with a fixed seed."""
    drawn = random.Random(0).sample(range(len(examples)), min(num, len(examples)))
    return [examples[index] for index in sorted(drawn)]
