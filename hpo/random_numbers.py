"""The random number generators of PyTorch, NumPy and Python."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from inspect import isfunction
from types import BuiltinMethodType, CellType, CodeType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor


def manual_seed(seed: int) -> None:
    """Seed the generators of the CPU and of the GPUs.

    `torch.manual_seed` also formats a stack for each absent kind of device, which takes 1 ms.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def generator_states() -> list[Tensor]:
    """Return the states of the generators of the CPU and of the GPUs, for `set_generator_states`."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def set_generator_states(states: list[Tensor]) -> None:
    """Set the generators to the states of `generator_states`, which may have more GPUs."""
    cpu, *gpus = states
    torch.set_rng_state(cpu)
    for index, state in enumerate(gpus[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)


def seed_all(seed: int) -> None:
    """Seed PyTorch, NumPy's global generator and Python's `random`."""
    manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def same_random_numbers(*owners: object) -> Iterator[None]:
    """Restore the generators of `seed_all`, and those that `owners` hold, after the block."""
    with ExitStack() as undo:
        undo.callback(set_all_states, all_states())
        for restore in map(_restoring, held_generators(*owners)):
            undo.callback(restore)
        yield


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES = (str, bytes, int, float, type, Tensor, np.ndarray, ModuleType)
_LIBRARIES = {"torch", "numpy", "random", "transformers", "builtins", "hpo"}
"""Packages whose functions hold no generator."""


def held_generators(*owners: object) -> list[Any]:
    """Return the generators in attributes, items, closures and globals of modules, objects and functions."""
    found, seen, queue = [], dict[int, object](), [*owners]
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, _LEAVES):
            continue
        seen[id(one)] = one  # kept, so that its number stays its own
        if isinstance(one, _GENERATORS):
            found.append(one)
        elif isinstance(one, Mapping):
            queue += one.values()
        elif isinstance(one, list | tuple | set):
            queue += one
        elif not isfunction(one):
            methods = (method for kind in type(one).__mro__ for method in vars(kind).values())
            queue += [*getattr(one, "__dict__", {}).values(), *filter(isfunction, methods)]
            if isinstance(one, partial | MethodType | BuiltinMethodType):
                names = ("__self__", "__func__", "func", "args", "keywords")
                queue += [getattr(one, name, None) for name in names]
        elif (one.__module__ or "").partition(".")[0] not in _LIBRARIES:
            cells = [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
            inner = (code for code in one.__code__.co_consts if isinstance(code, CodeType))
            used = {name for code in (one.__code__, *inner) for name in code.co_names}
            queue += [*cells, *(one.__defaults__ or ()), *map(one.__globals__.get, used)]
    return found


def _restoring(generator: Any) -> Callable[[], object]:
    """Return a function that puts a generator into its present state."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    names = ("getstate", "setstate") if isinstance(generator, random.Random) else ("get_state", "set_state")
    get, put = (getattr(generator, name) for name in names)
    return partial(put, get())


def all_states() -> dict[str, Any]:
    """Return the states of the generators of `seed_all` in plain containers and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    return {"torch": generator_states(), "numpy": numpy_state, "python": random.getstate()}


def set_all_states(states: Mapping[str, Any]) -> None:
    """Set the generators to the states of `all_states`."""
    set_generator_states(states["torch"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return the 64-bit seed of a rank's step. Up to 2^32 steps of a trial differ in the lower half too.

    The CPU's generator takes only the lower half, and random halves of a hundred thousand steps would
    coincide about once. So the lower half is the step after bijections of 32 bits (murmur3's finaliser) by
    `seed` and `rank`.
    """
    *keys, high = _seed_keys(seed, rank)
    for key in keys:
        step = _mix(step ^ key)
    return high << 32 | step


@cache
def _seed_keys(seed: int, rank: int) -> list[int]:
    return [int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(3)]


def _mix(bits: int) -> int:
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return bits ^ bits >> 16
