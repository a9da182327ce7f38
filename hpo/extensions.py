"""What a study's own code may bring beside kinds of tasks: poolings, losses, optimisers and schedules.

Each has typed options. An option is a setting of a trial, `<name>.<option>`, fixed or searched as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from hpo.code import Registry
from hpo.section import Section

Pooling = Literal["cls", "mean", "max", "last", "attention"]
Loss = Literal["auto", "cross_entropy", "bce", "focal", "mse", "huber"]
Optimizer = Literal["adamw", "adam", "adafactor", "lion", "sgd"]
Schedule = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True)
class Extension:
    """A thing with a name."""

    make: Callable[..., Any]
    kinds: tuple[str, ...] = ()
    """Of a loss: the kinds of tasks that it fits."""


POOLINGS = Registry[Extension]("pooling", get_args(Pooling))
LOSSES = Registry[Extension]("loss", get_args(Loss))
OPTIMIZERS = Registry[Extension]("optimizer", get_args(Optimizer))
SCHEDULES = Registry[Extension]("schedule", get_args(Schedule))
OPTIONS = Registry[type[Section]]("thing with options", ("loss_weight",))

Thing = TypeVar("Thing", bound=Callable[..., Any])


def pooling(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make a pooling known, a decorator: called with (hidden_size, options), it gives a module or function of
    (hidden_BLD, mask_BL) that returns [B, D]; the mask is 1 at real tokens."""
    return _adds(POOLINGS, name, options, ())


def loss(name: str, kinds: Sequence[str], options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make a loss of these kinds of tasks known, a decorator of a function of (kind, logits, target, options,
    class_weight, mask_BL) that returns the sum over `kind.labelled(target)`, as `Kind.loss_sum` does."""
    return _adds(LOSSES, name, options, tuple(kinds))


def optimizer(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make an optimiser known, a decorator: called with (groups, options), it gives a `torch.optim.Optimizer`
    over those groups, of which each has its `lr` and `weight_decay`."""
    return _adds(OPTIMIZERS, name, options, ())


def schedule(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make a schedule known, a decorator of a function of (remaining, options) that returns the factor of the
    learning rate; `remaining` falls from 1 after warm-up to 0 at the end of the budget."""
    return _adds(SCHEDULES, name, options, ())


def _adds(
    registry: Registry[Extension], name: str, options: type[Section], kinds: tuple[str, ...]
) -> Callable[[Thing], Thing]:
    def add(thing: Thing) -> Thing:
        if not name.isidentifier():
            raise ValueError(f"the name of a {registry.what} must be one of Python, but got {name!r}.")
        add_options(name, options)
        registry.add(name, Extension(thing, kinds))
        return thing

    return add


def add_options(name: str, options: type[Section]) -> None:
    """Make the options of a thing known. Raises ValueError where one has no default, or the name is taken."""
    options()
    if options.model_fields:
        OPTIONS.add(name, options)


def option_section(name: str) -> type[Section] | None:
    """The section that has the option `<name>.<option>`; None: there is none."""
    owner, _, key = name.partition(".")
    section = OPTIONS.get(owner)
    return section if section is not None and key in section.model_fields else None


def known_options() -> list[str]:
    """The names of all options."""
    return [f"{owner}.{key}" for owner, section in OPTIONS.items() for key in section.model_fields]


def options_of(name: str, given: Mapping[str, Any]) -> Section:
    """The options of a thing, with defaults. Raises pydantic's ValidationError."""
    own = {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{name}.")}
    return OPTIONS.get(name, Section).model_validate(own)
