"""The loss of each kind of task, and of a batch with all of them.

Every loss is a sum over the labelled items, in fp32 for every precision of the logits. The caller divides by
the number of items of the whole batch (`count_items`, on the CPU, before the forward pass). So micro-batches
cannot change the loss, also with missing labels. The kinds (`hpo.tasks`) compute the sums.

An item's loss is the negative log-likelihood of all its labels; for a multi_label row, the sum over its
classes. With a mean over classes instead, a task of 62 classes pulls on the shared encoder with a 62nd of the
strength of a single_label task beside it, and hardly learns before the other task has converged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hpo.data.batches import Batch
from hpo.errors import CodeError, InputError, shorten
from hpo.extensions import LOSSES
from hpo.tasks.kind import KINDS, Task, kind_of
from hpo.tasks.options import LossOptions


def check_loss(tasks: Iterable[Task], loss: str) -> None:
    """Raise InputError unless `loss` fits a task. The other tasks keep the loss of `auto`."""
    kinds = sorted({task.kind for task in tasks})
    fits = [name for name, kind in KINDS.items() if loss in kind.losses]
    fits += LOSSES[loss].kinds if loss in LOSSES else ()
    if loss != "auto" and not set(kinds) & set(fits):
        raise InputError(
            f"loss: `{loss}` fits the kinds {', '.join(fits)}, "
            f"but the tasks are of the kinds {', '.join(kinds)}. Use auto."
        )


def count_items(task: Task, target: Tensor) -> int:
    """Return the number of items with a labelled class or name (`hpo.tasks.kind`). On a GPU it waits."""
    return int(kind_of(task).labelled(target).sum())


def loss_sum(
    task: Task,
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    class_weight: Tensor | None,
    attention_mask_BL: Tensor,
) -> Tensor:
    """Return the fp32 sum of the task's loss over the labelled items. Shapes: `hpo.tasks.kind`.

    `class_weight` comes from `Kind.class_weights`. `attention_mask_BL` (nonzero at real tokens) excludes
    padding from span_extraction's softmax; the other kinds mark padding in their targets. A batch without
    items has a loss of 0 and a gradient of 0.
    """
    kind = kind_of(task)
    extension = LOSSES.get(options.loss)
    if extension is not None and task.kind in extension.kinds:
        arguments = (logits.float(), target, options.of(options.loss), class_weight, attention_mask_BL)
        loss, name = extension.make(kind, *arguments), options.loss
    else:
        fitting = options if options.loss in kind.losses else replace(options, loss=kind.losses[0])
        loss = kind.loss_sum(logits.float(), target, fitting, class_weight, attention_mask_BL)
        name = fitting.loss
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    if not isinstance(loss, Tensor) or loss.numel() != 1 or (needs_gradient and not loss.requires_grad):
        raise CodeError(
            f"the loss `{name}` must return a tensor with one number and its gradient by the logits, but got "
            f"`{shorten(repr(loss), 60)}`."
        )
    return loss.float().squeeze()


@dataclass(eq=False)
class MultitaskLoss:
    """The loss of a batch: each task's mean over its labelled items, weighted and summed, in fp32.

    With `log_variance` (one learnt s for each task) the term of a task's loss L is exp(-s) L + s: Kendall et
    al. 2018, arXiv 1705.07115, without the regression factor 1/2.
    """

    tasks: Sequence[Task]
    options: LossOptions
    loss_weight: Mapping[str, float]
    class_weight: Mapping[str, Tensor | None]
    log_variance: Mapping[str, nn.Parameter] | None = None

    def count(self, batch: Batch) -> dict[str, int]:
        """Return the labelled items of a batch by task. Call it on the CPU, before the move to the device."""
        return {task.name: count_items(task, batch.targets[task.name]) for task in self.tasks}

    def __call__(
        self,
        logits: Mapping[str, Tensor],
        batch: Batch,
        num_items: Mapping[str, int | Tensor],
        share: float | Tensor = 1.0,
    ) -> Tensor:
        """Return the loss of a batch, or a micro-batch's part of the loss of its global batch.

        `num_items` are the labelled items of the global batch (`count`), and `share` is this batch's part of
        its rows. A tensor stands for at least one item, and is not read.
        """
        total = torch.zeros((), device=batch.input_ids_BL.device)
        for task in self.tasks:
            name, weight = task.name, self.class_weight.get(task.name)
            target, mask_BL = batch.targets[name], batch.attention_mask_BL
            loss = loss_sum(task, logits[name], target, self.options, weight, mask_BL)
            items = num_items[name]
            has_items = isinstance(items, Tensor) or items > 0
            if isinstance(items, Tensor):
                loss = loss * items.reciprocal()  # like CUDA's division by a number
            elif items:
                loss = loss / items
            if self.log_variance is not None and has_items:
                log_variance = self.log_variance[name].float()
                loss = torch.exp(-log_variance) * loss + share * log_variance
            total = total + self.loss_weight.get(name, 1.0) * loss
        return total
