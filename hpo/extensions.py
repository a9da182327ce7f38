"""What a study's own code may bring beside kinds of tasks: heads, poolings, losses, metrics, encoders,
optimisers, schedules, sources of data, samplers, pruners, callbacks, and the training loop of a trial.

All but metrics have typed options. An option is a setting of a trial, `<name>.<option>`, fixed or searched as
any other. The options of a source are `data.options`; those of a sampler or a pruner are beside its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from pydantic import WrapValidator

from hpo.code import Registry, is_in_use
from hpo.section import Section

Head = Literal["linear", "mlp"]
Pooling = Literal["cls", "mean", "max", "last", "attention"]
Loss = Literal["auto", "cross_entropy", "bce", "focal", "mse", "huber"]
Optimizer = Literal["adamw", "adam", "adafactor", "lion", "sgd"]
Schedule = Literal["linear", "cosine", "constant"]
Source = Literal["synthetic", "jsonl", "csv", "parquet", "hub"]
Sampler = Literal["tpe", "gp", "nsga2", "random", "grid", "qmc"]
Pruner = Literal["hyperband", "asha", "median", "percentile", "patient", "promote", "none"]


@dataclass(frozen=True)
class Extension:
    """A thing with a name."""

    make: Callable[..., Any]
    options: type[Section] = Section
    kinds: tuple[str, ...] = ()
    """Of a loss or a metric: the kinds of tasks that it fits."""
    is_error: bool = False
    """Of a metric: less of it is better, in units of its own."""
    tokenizer: str = ""
    """Of an encoder: the name, folder or hub id of what makes its input."""


HEADS = Registry[Extension]("head", get_args(Head))
POOLINGS = Registry[Extension]("pooling", get_args(Pooling))
LOSSES = Registry[Extension]("loss", get_args(Loss))
METRICS = Registry[Extension]("metric")
ENCODERS = Registry[Extension]("encoder", ("minilm",))
OPTIMIZERS = Registry[Extension]("optimizer", get_args(Optimizer))
SCHEDULES = Registry[Extension]("schedule", get_args(Schedule))
SOURCES = Registry[Extension]("source of data", get_args(Source))
SAMPLERS = Registry[Extension]("sampler", get_args(Sampler))
PRUNERS = Registry[Extension]("pruner", get_args(Pruner))
CALLBACKS = Registry[Extension]("callback")
CALLBACK_METHODS = ("on_step", "on_evaluation", "on_end")
TRIALS = Registry[Extension]("training loop")
OPTIONS = Registry[type[Section]]("thing with options", ("loss_weight", "head_type", "sampling_weight"))

_NAMED_BY = {
    "encoder": ENCODERS,
    "head_type": HEADS,
    "pooling": POOLINGS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}

TRIAL = "trial"
"""The name of the one training loop."""
NO_DATA = "none"
"""The `data.source` of a study with a training loop of its own, which loads its data itself."""
_trains_itself: ContextVar[bool | None] = ContextVar("trains_itself", default=None)

Thing = TypeVar("Thing", bound=Callable[..., Any])


def or_own(takes: Callable[[Any], bool]) -> WrapValidator:
    """A validator of a choice, which may also be a name that the study's own code brings."""
    return WrapValidator(lambda value, handler: value if takes(value) else handler(value))


def head(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make a head known, a decorator: called with (hidden_size, num_outputs, options), it gives a module from
    [..., hidden_size] to the logits [..., num_outputs]. Its last `nn.Linear` with a bias of that size starts
    from the bias of the task's kind."""
    return _adds(HEADS, name, options)


def pooling(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make a pooling known, a decorator: called with (hidden_size, options), it gives a module or function of
    (hidden_BLD, mask_BL) that returns [B, D]; the mask is 1 at real tokens."""
    return _adds(POOLINGS, name, options)


def loss(name: str, kinds: Sequence[str], options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make a loss of these kinds of tasks known, a decorator of a function of (kind, logits, target, options,
    class_weight, mask_BL) that returns the sum over `kind.labelled(target)`, as `Kind.loss_sum` does."""
    return _adds(LOSSES, name, options, kinds=tuple(kinds))


def metric(name: str, kinds: Sequence[str], *, less_is_better: bool = False) -> Callable[[Thing], Thing]:
    """Make a metric of the tasks of these kinds known, `<task>/<name>`: a decorator of a function of (truths,
    predictions), of one a row each, that returns a number. A row has a class, a list of classes, a number, or
    a list of spans (name, start, end). NaN means that the metric is not defined for these predictions. A
    trial ends as `invalid` if no evaluation defines a metric that an objective or a limit needs.

    It is 1 where all is right, and its differences are told in hundredths; or with `less_is_better` it is an
    error in units of its own. Intervals call it a thousand times, with some rows left out or repeated.
    """
    return _adds(METRICS, name, kinds=tuple(kinds), is_error=less_is_better)


def encoder(
    name: str, options: type[Section] = Section, *, tokenizer: str = "minilm"
) -> Callable[[Thing], Thing]:
    """Make an encoder known, a decorator: called with (options), it gives a module of `input_ids` [B, L] and
    `attention_mask` [B, L], 1 at real tokens, that returns hidden states [B, L, D] or what has them as its
    `last_hidden_state`. Its first weights are what it comes with."""
    return _adds(ENCODERS, name, options, tokenizer=tokenizer)


def source(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make a source of data known, a decorator: called with (split, options), `split` being train, validation
    or test, it gives the split's rows, each a dict as a jsonl line has it, or None where there are none."""
    return _adds(SOURCES, name, options)


def optimizer(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make an optimiser known, a decorator: called with (groups, options), it gives a `torch.optim.Optimizer`
    over those groups, of which each has its `lr` and `weight_decay`."""
    return _adds(OPTIMIZERS, name, options)


def schedule(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Make a schedule known, a decorator of a function of (remaining, options) that returns the factor of the
    learning rate; `remaining` falls from 1 after warm-up to 0 at the end of the budget."""
    return _adds(SCHEDULES, name, options)


def sampler(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a sampler, a decorator. It is called with (options, seed) and returns an Optuna `BaseSampler`. The
    seed differs between the workers of a study."""
    return _adds(SAMPLERS, name, options)


def pruner(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a pruner, a decorator. It is called with (options) and returns an Optuna `BasePruner`."""
    return _adds(PRUNERS, name, options)


def callback(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a callback, which every trial of the study has, a decorator. It is called with (options) when a
    trial starts or resumes in a process, and returns an object with any of these methods. Each gets one
    argument, a `hpo.trial.user_callbacks.CallbackState`.

    - `on_step`: after each step but the last.
    - `on_evaluation`: after each evaluation, before it is stored. A killed trial may repeat it.
    - `on_end`: when the training ends, however it ends.

    `on_step` and `on_evaluation` end the training if they return a text, the reason. The trial is then
    evaluated and ends as `complete` with its best weights. A callback may read and log. It must not change
    the model, the optimizer or the data. An exception ends the trial as `failed`.
    """
    return _adds(CALLBACKS, name, options)


def trial(train: Thing) -> Thing:
    """Register the function that trains a trial, a decorator.

    The function is called with a `hpo.trial.own_loop.Run`. A study has at most one such function, and then
    neither `data` nor `model`. Its `search_space` and `training` may have any names.
    """
    if not callable(train):
        raise ValueError(f"`@hpo.trial` must decorate a function and takes no name, but got {train!r}.")
    return _adds(TRIALS, TRIAL)(train)


def has_own_loop() -> bool:
    """Return whether the study in hand has a training loop of its own."""
    known = _trains_itself.get()
    return TRIAL in TRIALS if known is None else known


@contextmanager
def own_loop_of(study: object) -> Iterator[None]:
    """Let `has_own_loop` speak of this content of a study file or definition inside the block.

    Code that is not loaded cannot tell. Then a study without data counts as one with its own loop.
    """
    content = study if isinstance(study, Mapping) else {}
    code, data = content.get("code"), content.get("data")
    if not code or not isinstance(code, Mapping):
        has_loop = False
    elif is_in_use(code):
        has_loop = TRIAL in TRIALS and TRIALS.hash_of(TRIAL) in code.values()
    else:
        has_loop = data is None or (isinstance(data, Mapping) and data.get("source") == NO_DATA)
    token = _trains_itself.set(has_loop)
    try:
        yield
    finally:
        _trains_itself.reset(token)


def _adds(
    registry: Registry[Extension], name: str, options: type[Section] = Section, **facts: Any
) -> Callable[[Thing], Thing]:
    def add(thing: Thing) -> Thing:
        if not name.isidentifier():
            raise ValueError(f"the name of a {registry.what} must be one of Python, but got {name!r}.")
        if not any(registry is other for other in (SOURCES, SAMPLERS, PRUNERS)):
            add_options(name, options)
        registry.add(name, Extension(thing, options, **facts))
        return thing

    return add


def is_own(setting: str, value: Any) -> bool:
    """Whether the code in use has brought the value of a setting that names a thing."""
    registry = _NAMED_BY.get(setting.partition(".")[0])
    return registry is not None and isinstance(value, str) and value in registry


def metrics_of(kind: str) -> dict[str, Extension]:
    """The metrics of tasks of a kind that the code in use brings."""
    return {name: metric for name, metric in METRICS.items() if kind in metric.kinds}


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


def options_in(extension: Extension, given: Mapping[str, Any]) -> Section:
    """The options of an extension, with defaults, from keys without its name. Raises ValidationError."""
    return extension.options.model_validate(dict(given))


def options_of(name: str, given: Mapping[str, Any]) -> Section:
    """The options of a thing, with defaults. Raises pydantic's ValidationError."""
    own = {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{name}.")}
    return OPTIONS.get(name, Section).model_validate(own)
