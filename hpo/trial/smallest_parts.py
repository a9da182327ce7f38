"""The smallest set of parts in fp32 that makes a precision `ok` by the compatibility check.

A single part is looked for first, the one with the fewest weights that suffices. Else all parts together are
reduced by delta debugging (ddmin, Zeller and Hildebrandt 2002, doi 10.1109/32.988498): no part of what it
leaves can be left out, though another set might have fewer. Last, the attention of all layers is tried in the
place of whole layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from torch import nn

from hpo.models.model_parts import num_weights, parts_of
from hpo.models.multitask import MultitaskModel
from hpo.precision.part_names import ATTENTION, HEADS, LAYER, task_of

Parts = tuple[str, ...]


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
    for part in sorted(known, key=lambda part: num_weights(model, [part])):
        if is_ok((part,)):
            return (part,)
    found = _ddmin(units, is_ok)
    layers = [part for part in found if part.startswith(LAYER)]
    attention = (ATTENTION, *(part for part in found if part not in layers))
    if len(layers) > 1 and ATTENTION in known and is_ok(attention):
        return attention
    return found


def _ddmin(parts: Parts, is_ok: Callable[[Parts], bool]) -> Parts:
    """A subset that is ok and of which no single part can be left out; `parts` are ok, singles are not."""
    num_chunks = 2
    while len(parts) > 2:
        chunks = _cut(parts, num_chunks)
        rests = [tuple(part for part in parts if part not in chunk) for chunk in chunks]
        tried = (each for each in (*chunks, *rests) if 1 < len(each) < len(parts))
        smaller = next(filter(is_ok, tried), None)
        if smaller is not None:
            num_chunks = 2 if smaller in chunks else max(num_chunks - 1, 2)
            parts = smaller
        elif num_chunks < len(parts):
            num_chunks = min(2 * num_chunks, len(parts))
        else:
            break
    return parts


def _cut(parts: Sequence[str], num_chunks: int) -> list[Parts]:
    ends = [len(parts) * index // num_chunks for index in range(num_chunks + 1)]
    return [tuple(parts[start:end]) for start, end in itertools.pairwise(ends)]
