"""The smallest set of parts in fp32 that makes a precision `ok` by the compatibility check.

A single part is looked for first, the one with the fewest weights that suffices, then a set
(`hpo.trial.smallest_set`). Last, the attention of all layers is tried in the place of whole layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from hpo.models.model_parts import num_weights, parts_of
from hpo.models.multitask import MultitaskModel
from hpo.precision.part_names import ATTENTION, HEADS, LAYER, task_of
from hpo.trial.smallest_set import Names as Parts
from hpo.trial.smallest_set import smallest_set


def smallest_parts(
    model: MultitaskModel, is_ok: Callable[[Parts], bool], impossible: Collection[str] = ()
) -> Parts | None:
    """The parts of `model` that have to be in fp32 for `is_ok`; None where not even all of them suffice.

    `is_ok` is told a set of parts and says whether the precision then is; it is asked for none of the
    `impossible` ones.
    """
    known = [part for part in parts_of(model) if part not in impossible]
    whole_heads = isinstance(model.pool, nn.Module)  # which is part of no task's head
    units = tuple(
        part for part in known if part not in (ATTENTION, HEADS) and not (whole_heads and task_of(part))
    ) + ((HEADS,) if whole_heads else ())
    if not units or not is_ok(units):
        return None
    found = smallest_set(units, sorted(known, key=lambda part: num_weights(model, [part])), is_ok)
    if len(found) == 1:
        return found
    layers = [part for part in found if part.startswith(LAYER)]
    attention = (ATTENTION, *(part for part in found if part not in layers))
    if len(layers) > 1 and ATTENTION in known and is_ok(attention):
        return attention
    return found
