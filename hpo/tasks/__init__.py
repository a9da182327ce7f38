"""The kinds of task, and the types that every floor needs: task, example, tokenised split.

Importing this package registers its six kinds by name (`hpo.tasks.kind.KINDS`).
"""

from hpo.extensions import METRICS
from hpo.tasks.kind import KINDS, register
from hpo.tasks.labels import MultiLabel, SingleLabel
from hpo.tasks.regression import Regression
from hpo.tasks.span_extraction import SpanExtraction
from hpo.tasks.span_per_label import SpanPerLabel
from hpo.tasks.token_classification import TokenClassification

for _kind in (SingleLabel, MultiLabel, TokenClassification, SpanExtraction, SpanPerLabel, Regression):
    register(_kind)
METRICS.reserved = {"score", *(name for kind in KINDS.values() for name in kind.metrics)}
