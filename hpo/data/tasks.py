"""What a task is, and the loss of each kind of task.

A data set names its tasks in `tasks.json`; every task has one of six kinds, and the kind alone decides
the layout of logits and targets, the loss and the metrics:

    kind                  logits        target                      missing  an item is
    single_label          [B, C]        int64 [B]                   -100     a row
    multi_label           [B, C]        float32 [B, C] in {0, 1}    -1       a row
    regression            [B, 1]        float32 [B], raw units      NaN      a row
    token_classification  [B, L, 2N+1]  int64 [B, L]                -100     a token
      spans may overlap   [B, L, 3N]    int64 [B, L, N]             -100     a token
    span_extraction       [B, L, 2]     int64 [B, 2], inclusive     -100     a row
    span_per_label        [B, L, C]     float32 [B, L, C] in {0, 1} -1       a token and class

Every loss is a sum over the labelled items, in fp32 whatever the precision of the logits. The caller
divides by the number of items of the whole batch (`count_items`, on the CPU, before the forward), so
splitting a batch into micro-batches cannot change the loss, also where labels are missing.

An item's loss is the negative log-likelihood of all that is known of it, for a multi_label row the sum
over its classes. With a mean over classes instead, a task of 62 classes pulls on the shared encoder with
a 62nd of the strength of a single_label task beside it, and hardly learns before that one has settled.

Nothing here
looks at a tensor's values from Python, so a step needs no device sync and can be captured in a CUDA
graph. Missing items are masked before the arithmetic and not only after it: a NaN target behind
`torch.where` would still give a NaN gradient.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpo.config.data_config import TASK_KINDS
from hpo.errors import DataError, InputError, did_you_mean

IGNORE_INDEX = -100

# The first loss of a kind is its `auto`. focal is left out of span_extraction: its classes are positions,
# and the imbalance that focal is for does not exist between them.
LOSSES = {
    "single_label": ("cross_entropy", "focal"),
    "multi_label": ("bce", "focal"),
    "token_classification": ("cross_entropy", "focal"),
    "span_extraction": ("cross_entropy",),
    "span_per_label": ("bce", "focal"),
    "regression": ("mse", "huber"),
}
LOSS_NAMES = ("auto", "cross_entropy", "bce", "focal", "mse", "huber")

# The first metric of a kind is its primary one.
METRICS = {
    "single_label": ("f1_macro", "f1_micro", "accuracy"),
    "multi_label": ("f1_macro", "f1_micro", "exact_match"),
    "token_classification": ("span_f1", "span_overlap_f1", "f1_macro"),
    "span_extraction": (
        "span_f1",
        "span_overlap_f1",
        "exact_match",
        "span_overlap_f1_answerable",
        "exact_match_answerable",
    ),
    "span_per_label": ("span_f1", "span_overlap_f1", "f1_macro"),
    "regression": ("r2", "mae", "rmse"),
}

# Balanced weights stay within these bounds: a class seen 9 times in 2000 rows would otherwise weigh 220
# times its negatives, and one mislabelled row would steer the whole head.
MIN_CLASS_WEIGHT = 0.1
MAX_CLASS_WEIGHT = 10.0


@dataclass(frozen=True)
class Task:
    """One task of a data set.

    `labels` are the classes, or the span names for the kinds whose truth is spans; empty for regression.
    `target_mean` and `target_std` are those of the train split; a regression head predicts
    `(target - target_mean) / target_std`, so that its loss is of the size of the others.
    """

    name: str
    kind: str
    labels: tuple[str, ...] = ()
    evidence_for: str | None = None
    spans_may_overlap: bool = False
    inside_segment: str | None = None
    target_mean: float = 0.0
    target_std: float = 1.0

    @property
    def level(self) -> str:
        """`sequence` (one vector of logits a window) or `token` (one a token)."""
        return "sequence" if self.kind in ("single_label", "multi_label", "regression") else "token"

    @property
    def num_outputs(self) -> int:
        """Size of the logits' last dimension; for the layouts see the module's table.

        token_classification: O, B-1, I-1, B-2, ... jointly, or (O, B, I) for each name when spans may
        overlap. span_extraction: start and end.
        """
        num_labels = len(self.labels)
        if self.kind == "token_classification":
            return 3 * num_labels if self.spans_may_overlap else 2 * num_labels + 1
        return {"span_extraction": 2, "regression": 1}.get(self.kind, num_labels)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `hpo.training.metrics.score` gives, the primary one first."""
        return METRICS[self.kind]

    @property
    def primary_metric(self) -> str:
        """The metric that enters the objective `score`."""
        return METRICS[self.kind][0]


# What each kind must say and may say. Other keys describe the data for people and are passed over, unless
# they look like one of these misspelt.
_REQUIRED_KEYS = {
    "single_label": ("classes",),
    "multi_label": ("classes",),
    "token_classification": ("span_names",),
    "span_extraction": ("span_names",),
    "span_per_label": ("span_names", "evidence_for"),
    "regression": (),
}
_OPTIONAL_KEYS = ("spans_may_overlap", "inside_segment", "max_spans")
_KNOWN_KEYS = ("kind", "classes", "span_names", "evidence_for", *_OPTIONAL_KEYS)


def parse_tasks(tasks_json: Mapping[str, Any], where: str) -> tuple[Task, ...]:
    """Return the tasks of a `tasks.json`, in its order.

    `tasks_json` is the file's content, `{"tasks": {name: {"kind": ...}}}`, or the inner mapping alone;
    `where` names it in messages. Raises DataError at the first thing that does not hold.
    """
    if not isinstance(tasks_json, Mapping):
        raise DataError(f"{where}: must be a mapping of tasks, but got {_shown(tasks_json)}.")
    specs = tasks_json.get("tasks", tasks_json)
    if not isinstance(specs, Mapping) or not specs:
        raise DataError(f"{where}: `tasks` must name at least one task, but got {_shown(specs)}.")
    tasks = tuple(_parse_task(name, spec, f"{where}: task `{name}`") for name, spec in specs.items())
    by_name = {task.name: task for task in tasks}
    for task in tasks:
        if task.evidence_for is not None:
            _check_evidence(task, by_name, f"{where}: task `{task.name}`")
    return tasks


def _parse_task(name: Any, spec: Any, at: str) -> Task:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise DataError(f"{at}: a name must be a letter followed by letters, digits, `_` or `-`.")
    if name == "score":
        raise DataError(f"{at}: `score` names the objective over all tasks. Give the task another name.")
    if not isinstance(spec, Mapping):
        raise DataError(f"{at}: must be a mapping with the key `kind`, but got {_shown(spec)}.")
    kind = spec.get("kind")
    if kind not in TASK_KINDS:
        raise DataError(f"{at}: unknown kind {_shown(kind)}.{did_you_mean(str(kind), TASK_KINDS)}")
    for key in spec:
        near = get_close_matches(str(key), _KNOWN_KEYS, n=1, cutoff=0.8)
        if key not in _KNOWN_KEYS and near:
            raise DataError(f"{at}: unknown key `{key}`. Did you mean `{near[0]}`?")
    required = _REQUIRED_KEYS[kind]
    for key in required:
        if key not in spec:
            raise DataError(f"{at}: the kind {kind} needs the key `{key}`.")
    labels = _parse_labels(spec, required[0], at) if required else ()
    if kind == "single_label" and len(labels) < 2:
        raise DataError(f"{at}: `classes` must hold at least two classes, but got {list(labels)}.")
    if kind == "span_extraction" and (len(labels) != 1 or spec.get("max_spans", 1) != 1):
        raise DataError(
            f"{at}: span_extraction finds at most one span of one name, but got span_names={list(labels)}, "
            f"max_spans={spec.get('max_spans', 1)}. Use token_classification for several."
        )
    return Task(
        name=name,
        kind=kind,
        labels=labels,
        evidence_for=_typed(spec, "evidence_for", str, at) if kind == "span_per_label" else None,
        spans_may_overlap=bool(_typed(spec, "spans_may_overlap", bool, at)),
        inside_segment=_typed(spec, "inside_segment", str, at),
    )


def _parse_labels(spec: Mapping[str, Any], key: str, at: str) -> tuple[str, ...]:
    labels = spec[key]
    if not isinstance(labels, Sequence) or isinstance(labels, str) or not labels:
        raise DataError(f"{at}: `{key}` must be a list of names, but got {_shown(labels)}.")
    wrong = [label for label in labels if not isinstance(label, str) or not label]
    if wrong:
        raise DataError(f"{at}: `{key}` must hold non-empty strings, but got {_shown(wrong[0])}. Quote it.")
    twice = sorted({label for label in labels if list(labels).count(label) > 1})
    if twice:
        raise DataError(f"{at}: `{key}` must not repeat a name, but {_shown(twice[0])} occurs twice.")
    return tuple(labels)


def _check_evidence(task: Task, by_name: Mapping[str, Task], at: str) -> None:
    assert task.evidence_for is not None
    labelled = by_name.get(task.evidence_for)
    if labelled is None:
        known = [name for name in by_name if name != task.name]
        hint = did_you_mean(task.evidence_for, known) if known else ""
        raise DataError(f"{at}: `evidence_for` names no task: {_shown(task.evidence_for)}.{hint}")
    if labelled.kind not in ("single_label", "multi_label"):
        raise DataError(
            f"{at}: `evidence_for` must name a single_label or multi_label task, "
            f"but `{labelled.name}` is {labelled.kind}."
        )
    for label in task.labels:
        if label not in labelled.labels:
            raise DataError(
                f"{at}: span name {_shown(label)} is no class of `{labelled.name}`."
                f"{did_you_mean(label, labelled.labels)}"
            )


def _typed(spec: Mapping[str, Any], key: str, kind: type, at: str) -> Any:
    value = spec.get(key)
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{at}: `{key}` must be a {kind.__name__}, but got {_shown(value)}.")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def initial_bias(task: Task) -> Tensor:
    """Return the bias that a fresh head starts from, float32 [num_outputs]: the log-odds of rough priors.

    One class of a multi_label task holds in a row; a token lies in a span of some name with probability
    1/4, in the evidence for a class that holds with 1/10; elsewhere 0. From 0 everywhere, the first steps
    only learn that positives are rare, and the second moments that Adam keeps of their large gradients
    then hold back the next thousand steps. Lin et al. 2017 (arXiv:1708.02002), section 4.1, for
    detection; on the 17 overlapping slots of NLU++ two epochs give a span F1 of 0.69 instead of 0.
    """
    bias = torch.zeros(task.num_outputs)
    if task.kind == "multi_label":
        bias.fill_(-math.log(max(len(task.labels) - 1, 1)))
    elif task.kind == "span_per_label":
        bias.fill_(-math.log(9))
    elif task.kind == "token_classification":
        num_names = len(task.labels)
        inside = 1 / 4 / num_names if task.spans_may_overlap else 1 / 4
        num_tags = 2 if task.spans_may_overlap else 2 * num_names
        bias[:: num_tags + 1] = math.log((1 - inside) / (inside / num_tags))
    return bias


@dataclass(frozen=True)
class LossOptions:
    """A trial's loss settings, shared by its tasks.

    `label_smoothing` in [0, 1) moves that share of a target to the uniform distribution over classes
    (over positions in span_extraction, over {0, 1} for binary targets); regression has none.
    `focal_gamma` >= 0 matters to the loss `focal` alone; 0 makes it cross-entropy.
    """

    loss: str = "auto"
    label_smoothing: float = 0.0
    focal_gamma: float = 2.0


def check_loss(tasks: Iterable[Task], loss: str) -> None:
    """Raise InputError unless `loss` is known and fits a task.

    A study has one `loss` for all its tasks. A task of a kind that it does not fit keeps the loss of
    `auto`, so `focal` beside a regression task leaves that at mse; a loss that would change nothing at
    all is a mistake.
    """
    if loss not in LOSS_NAMES:
        raise InputError(f"loss: unknown loss {_shown(loss)}.{did_you_mean(str(loss), LOSS_NAMES)}")
    kinds = sorted({task.kind for task in tasks})
    fits = [kind for kind in TASK_KINDS if loss in LOSSES[kind]]
    if loss != "auto" and not set(kinds) & set(fits):
        raise InputError(
            f"loss: `{loss}` fits the kinds {', '.join(fits)}, "
            f"but the tasks are of the kinds {', '.join(kinds)}. Use auto."
        )


def loss_name(kind: str, loss: str) -> str:
    """Return the loss that a task of this kind gets under a study's `loss` (see `check_loss`)."""
    return loss if loss in LOSSES[kind] else LOSSES[kind][0]


def _tags_each_name(task: Task) -> bool:
    return task.kind == "token_classification" and task.spans_may_overlap


def _labelled(task: Task, target: Tensor) -> Tensor:
    if task.kind == "regression":
        return ~torch.isnan(target)
    if task.kind in ("multi_label", "span_per_label"):
        return target >= 0
    return target != IGNORE_INDEX


def count_items(task: Task, target: Tensor) -> int:
    """Return the number of labelled items of a target, as the module's table counts them.

    An item is labelled if any of its classes or names is. Call it with the target on the CPU: on a GPU it
    would wait for the device.
    """
    labelled = _labelled(task, target)
    if task.kind in ("multi_label", "span_extraction") or _tags_each_name(task):
        labelled = labelled.any(dim=-1)
    return int(labelled.sum())


def loss_sum(
    task: Task,
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    class_weight: Tensor | None,
    attention_mask_BL: Tensor,
) -> Tensor:
    """Return the fp32 sum of the task's loss over the labelled items.

    For shapes see the module's table. `class_weight` comes from `class_weights` and lies on the device
    of the logits. `attention_mask_BL` (nonzero at real tokens) keeps padding out of span_extraction's
    softmax over positions; the other kinds mark padding in their targets. A batch without items gives 0
    with a gradient of 0.
    """
    logits = logits.float()
    loss = loss_name(task.kind, options.loss)
    gamma = options.focal_gamma if loss == "focal" else 0.0
    if task.kind == "regression":
        return _regression_sum(task, logits.squeeze(-1), target, loss)
    if task.kind == "span_extraction":
        return _position_sum(logits, target, attention_mask_BL != 0, options.label_smoothing)
    if task.kind in ("multi_label", "span_per_label"):
        return _binary_sum(logits, target, gamma, options.label_smoothing, class_weight)
    num_classes = 3 if _tags_each_name(task) else task.num_outputs
    logits_NK = logits.reshape(-1, num_classes)
    return _multiclass_sum(logits_NK, target.reshape(-1), gamma, options.label_smoothing, class_weight)


def _multiclass_sum(
    logits_NK: Tensor, target_N: Tensor, gamma: float, label_smoothing: float, weight_K: Tensor | None
) -> Tensor:
    """Cross-entropy, or the focal loss of Lin et al. 2017 (arXiv:1708.02002), eq. 5.

    With q the target smoothed as in `F.cross_entropy` and w the class weights, an item's loss is
    sum_c w_c q_c (1 - p_c)^gamma (-log p_c): for gamma = 0 exactly `F.cross_entropy`, for a one-hot q
    the focal loss.
    """
    if gamma == 0.0:
        return F.cross_entropy(
            logits_NK,
            target_N,
            weight_K,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
    labelled_N = target_N != IGNORE_INDEX
    log_p_NK = F.log_softmax(torch.where(labelled_N[:, None], logits_NK, 0.0), dim=-1)
    # The clamp keeps log(1 - p) and its gradient finite where p rounds to 1.
    p_NK = log_p_NK.exp().clamp(max=1 - torch.finfo(torch.float32).eps)
    loss_NK = -log_p_NK * torch.exp(gamma * torch.log1p(-p_NK))
    if weight_K is not None:
        loss_NK = loss_NK * weight_K
    loss_N = loss_NK.gather(1, target_N.clamp(min=0)[:, None]).squeeze(1)
    if label_smoothing:
        loss_N = (1 - label_smoothing) * loss_N + label_smoothing * loss_NK.mean(dim=-1)
    return torch.where(labelled_N, loss_N, 0.0).sum()


def _binary_sum(
    logits: Tensor, target: Tensor, gamma: float, label_smoothing: float, positive_weight_C: Tensor | None
) -> Tensor:
    """Binary cross-entropy, or the binary focal loss (arXiv:1708.02002, eq. 4), for each class by itself."""
    labelled = target >= 0
    logits = torch.where(labelled, logits, 0.0)
    y = torch.where(labelled, target, 0.0) * (1 - label_smoothing) + label_smoothing / 2
    log_p, log_not_p = F.logsigmoid(logits), F.logsigmoid(-logits)
    positive, negative = -log_p, -log_not_p
    if gamma != 0.0:
        # (1 - p)^gamma by way of the logarithm: its gradient is finite at p = 1 for every gamma > 0.
        positive, negative = positive * torch.exp(gamma * log_not_p), negative * torch.exp(gamma * log_p)
    if positive_weight_C is not None:
        positive = positive * positive_weight_C
    return torch.where(labelled, y * positive + (1 - y) * negative, 0.0).sum()


def _position_sum(logits_BL2: Tensor, target_B2: Tensor, real_BL: Tensor, label_smoothing: float) -> Tensor:
    """Mean of the start's and the end's cross-entropy over the real positions, summed over rows."""
    real_BL1 = real_BL[:, :, None]
    masked_BL2 = torch.where(real_BL1, logits_BL2, torch.finfo(torch.float32).min)
    log_p_BL2 = F.log_softmax(masked_BL2, dim=1)
    loss_B2 = -log_p_BL2.gather(1, target_B2.clamp(min=0)[:, None, :]).squeeze(1)
    if label_smoothing:
        uniform_B2 = -torch.where(real_BL1, log_p_BL2, 0.0).sum(dim=1) / real_BL1.sum(dim=1)
        loss_B2 = (1 - label_smoothing) * loss_B2 + label_smoothing * uniform_B2
    return torch.where(target_B2 != IGNORE_INDEX, loss_B2, 0.0).sum() / 2


def _regression_sum(task: Task, output_B: Tensor, target_B: Tensor, loss: str) -> Tensor:
    """Squared error, or the Huber loss with delta 1, in units of the train split's standard deviation."""
    labelled_B = ~torch.isnan(target_B)
    target_B = (torch.where(labelled_B, target_B, 0.0) - task.target_mean) / (task.target_std or 1.0)
    output_B = torch.where(labelled_B, output_B, 0.0)
    function = F.huber_loss if loss == "huber" else F.mse_loss
    return torch.where(labelled_B, function(output_B, target_B, reduction="none"), 0.0).sum()


def class_weights(task: Task, targets: Iterable[Tensor]) -> Tensor | None:
    """Return the weights of `class_weighting: balanced` from the train split's targets, or None.

    `targets` are CPU targets of any batching. Multi-class kinds: scikit-learn's `balanced`,
    n / (k * count), with k the number of classes that occur, float32 [K] ([3] for O, B and I over all
    names when spans may overlap). Binary kinds: negatives / positives of each class, float32 [C], the
    weight of a positive. All are clipped to [0.1, 10]; a class that does not occur gets 1. None for
    regression and span_extraction, which have no classes.
    """
    if task.kind in ("regression", "span_extraction"):
        return None
    if task.kind in ("multi_label", "span_per_label"):
        size = len(task.labels)
        positives, negatives = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        for target in targets:
            target_NC = target.reshape(-1, size)
            positives += (target_NC == 1).sum(dim=0)
            negatives += (target_NC == 0).sum(dim=0)
        counts, weights = positives, negatives / positives.clamp(min=1)
    else:
        size = 3 if _tags_each_name(task) else task.num_outputs
        counts = torch.zeros(size, dtype=torch.int64)
        for target in targets:
            counts += torch.bincount(target[target != IGNORE_INDEX], minlength=size)
        weights = counts.sum() / ((counts > 0).sum() * counts).clamp(min=1)
    return torch.where(counts > 0, weights.clamp(MIN_CLASS_WEIGHT, MAX_CLASS_WEIGHT), 1.0)
