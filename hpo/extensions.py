"""Extensions of a study's own code: heads, poolings, losses, metrics, encoders, optimisers, schedules,
sources of data, samplers, pruners, callbacks, and a training loop.

All but metrics have typed options. An option is a trial setting `<name>.<option>`, fixed or searched. Options
of a source are in `data.options`; options of a sampler or a pruner are beside its name.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from pydantic import WrapValidator

from hpo.code import Registry, is_in_use
from hpo.errors import CodeError, shorten
from hpo.section import Section

Head = Literal["linear", "mlp"]
Pooling = Literal["cls", "mean", "max", "last", "attention"]
Loss = Literal["auto", "cross_entropy", "bce", "focal", "mse", "huber"]
Optimizer = Literal["adamw", "adam", "adafactor", "lion", "sgd"]
Schedule = Literal["linear", "cosine", "constant"]
Source = Literal["synthetic", "jsonl", "csv", "parquet", "conll", "hub"]
Sampler = Literal["tpe", "gp", "nsga2", "random", "grid", "qmc"]
Pruner = Literal["hyperband", "asha", "median", "percentile", "patient", "promote", "none"]


_TAKES = {
    "head": "hidden_size, num_outputs, options",
    "pooling": "hidden_size, options",
    "loss": "kind, logits, target, options, class_weight, mask_BL",
    "metric": "truths, predictions",
    "encoder": "options",
    "optimizer": "groups, options",
    "schedule": "remaining, options",
    "source of data": "split, options",
    "sampler": "options, seed",
    "pruner": "options",
    "callback": "options",
    "training loop": "run",
}
"""Arguments of the functions, by what they add."""


@dataclass(frozen=True)
class Extension:
    """A function of the study's own code, and its options."""

    make: Callable[..., Any]
    options: type[Section] = Section
    kinds: tuple[str, ...] = ()
    """Losses and metrics: fitting kinds of tasks."""
    is_error: bool = False
    """Metrics: less is better, in units of its own."""
    tokenizer: str = ""
    """Encoders: name, folder or hub id of the tokenizer."""


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
"""Name of a study's own training loop."""
NO_DATA = "none"
"""The `data.source` of a study with its own training loop."""
_has_own_loop: ContextVar[bool | None] = ContextVar("has_own_loop", default=None)

Thing = TypeVar("Thing", bound=Callable[..., Any])


def or_own(accepts: Callable[[Any], bool]) -> WrapValidator:
    """Return a validator of a choice or a name of the study's own code."""
    return WrapValidator(lambda value, handler: value if accepts(value) else handler(value))


def _register(
    registry: Registry[Extension], name: str, options: type[Section] = Section, **facts: Any
) -> Callable[[Thing], Thing]:
    def add(thing: Thing) -> Thing:
        if not name.isidentifier():
            raise ValueError(f"the name of a {registry.kind} must be one of Python, but got {name!r}.")
        takes = _TAKES[registry.kind]
        try:
            inspect.signature(thing).bind(*takes.split(", "))
        except TypeError as error:
            raise ValueError(f"the {registry.kind} `{name}` must take ({takes}): {error}.") from None
        if not any(registry is other for other in (SOURCES, SAMPLERS, PRUNERS)):
            add_options(name, options)
        registry.add(name, Extension(thing, options, **facts))
        return thing

    return add


def head(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a head, a decorator. The function gets (hidden_size, num_outputs, options) and returns a module
    from [..., hidden_size] to the logits [..., num_outputs]. The last `nn.Linear` of this size with a bias
    starts with the bias of the task's kind."""
    return _register(HEADS, name, options)


def pooling(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a pooling, a decorator. The function gets (hidden_size, options) and returns a module or function
    from (hidden_BLD, mask_BL) to [B, D]. The mask is 1 at real tokens."""
    return _register(POOLINGS, name, options)


def loss(name: str, kinds: Sequence[str], options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a loss of these kinds of tasks, a decorator. The function gets (kind, logits, target, options,
    class_weight, mask_BL) and returns the sum over `kind.labelled(target)`, like `Kind.loss_sum`."""
    return _register(LOSSES, name, options, kinds=tuple(kinds))


def metric(name: str, kinds: Sequence[str], *, less_is_better: bool = False) -> Callable[[Thing], Thing]:
    """Add a metric `<task>/<name>` of tasks of these kinds, a decorator. The function gets (truths,
    predictions), one of each per row, and returns a number: 1 if all is right, or with `less_is_better` an
    error in units of its own. A row has a class, a list of classes, a number, or a list of spans (name,
    start, end). NaN: the metric is not defined for these predictions. If no evaluation defines the metric of
    an objective or a limit, the trial ends as `invalid`. Intervals call it a thousand times, with some rows
    left out or repeated.
    """
    return _register(METRICS, name, kinds=tuple(kinds), is_error=less_is_better)


def encoder(
    name: str, options: type[Section] = Section, *, tokenizer: str = "minilm"
) -> Callable[[Thing], Thing]:
    """Add an encoder, a decorator. The function gets (options) and returns a module with its first weights.
    The module gets `input_ids` [B, L] and `attention_mask` [B, L], 1 at real tokens. It returns hidden states
    [B, L, D], or an object with them as its `last_hidden_state`."""
    return _register(ENCODERS, name, options, tokenizer=tokenizer)


def source(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a source of data, a decorator. The function gets (split, options) with `split` train, validation or
    test. It returns the split's rows, each a dict like a jsonl line, or None without such a split."""
    return _register(SOURCES, name, options)


def optimizer(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add an optimiser, a decorator. The function gets (groups, options) and returns a
    `torch.optim.Optimizer` over the groups. Each has `lr` and `weight_decay`."""
    return _register(OPTIMIZERS, name, options)


def schedule(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a schedule, a decorator. The function gets (remaining, options) and returns the factor of the
    learning rate. `remaining` falls from 1 after warm-up to 0 at the end of the budget."""
    return _register(SCHEDULES, name, options)


def sampler(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a sampler, a decorator. The function gets (options, seed) and returns an Optuna `BaseSampler`. The
    seed differs between the workers of a study."""
    return _register(SAMPLERS, name, options)


def pruner(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a pruner, a decorator. The function gets (options) and returns an Optuna `BasePruner`."""
    return _register(PRUNERS, name, options)


def callback(name: str, options: type[Section] = Section) -> Callable[[Thing], Thing]:
    """Add a callback of every trial, a decorator. The function gets (options) at each start or resume of a
    trial, and returns an object with any of these methods. Each gets a
    `hpo.trial.user_callbacks.CallbackState`.

    - `on_step`: after each step but the last.
    - `on_evaluation`: after each evaluation, before it is stored. A killed trial may repeat it.
    - `on_end`: at the end of the training, in any case.

    `on_step` and `on_evaluation` end the training if they return a text, the reason. The trial is then
    evaluated and ends as `complete` with its best weights. A callback may read and log. It must not change
    the model, the optimizer or the data. An exception ends the trial as `failed`.
    """
    return _register(CALLBACKS, name, options)


def trial(train: Thing) -> Thing:
    """Add the training loop of a study, a decorator. The function gets a `hpo.trial.own_loop.Run`.

    A study has at most one, and then neither `data` nor `model`. Its `search_space` and `training` may have
    any names.
    """
    if not callable(train):
        raise ValueError(f"`@hpo.trial` must decorate a function and takes no name, but got {train!r}.")
    return _register(TRIALS, TRIAL)(train)


def has_own_loop() -> bool:
    known = _has_own_loop.get()
    return TRIAL in TRIALS if known is None else known


@contextmanager
def own_loop_of(study: object) -> Iterator[None]:
    """Set `has_own_loop` inside the block by the content of a study file or definition.

    Without loaded code, a study without data counts as one with its own loop.
    """
    content = study if isinstance(study, Mapping) else {}
    code, data = content.get("code"), content.get("data")
    if not code or not isinstance(code, Mapping):
        has_loop = False
    elif is_in_use(code):
        has_loop = TRIAL in TRIALS and TRIALS.hash_of(TRIAL) in code.values()
    else:
        has_loop = data is None or (isinstance(data, Mapping) and data.get("source") == NO_DATA)
    token = _has_own_loop.set(has_loop)
    try:
        yield
    finally:
        _has_own_loop.reset(token)


def as_number(what: str, value: Any) -> float:
    """Return the number from a function of the study's own code. Raises CodeError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        message = f"the {what} must return a number, but got `{shorten(repr(value), 60)}`."
        raise CodeError(message) from None


def is_own(setting: str, value: Any) -> bool:
    """Return whether the value of a setting is an extension in use."""
    registry = _NAMED_BY.get(setting.partition(".")[0])
    return registry is not None and isinstance(value, str) and value in registry


def metrics_of(kind: str) -> dict[str, Extension]:
    return {name: metric for name, metric in METRICS.items() if kind in metric.kinds}


def add_options(name: str, options: type[Section]) -> None:
    """Add the options of an extension. Raises ValueError for a missing default or a duplicate name."""
    options()
    if options.model_fields:
        OPTIONS.add(name, options)


def option_section(name: str) -> type[Section] | None:
    """Return the section with the option `<name>.<option>`, or None."""
    owner, _, key = name.partition(".")
    section = OPTIONS.get(owner)
    return section if section is not None and key in section.model_fields else None


def known_options() -> list[str]:
    return [f"{owner}.{key}" for owner, section in OPTIONS.items() for key in section.model_fields]


def options_in(extension: Extension, given: Mapping[str, Any]) -> Section:
    """Return the options of an extension from keys without its name. Raises ValidationError."""
    return extension.options.model_validate(dict(given))


def options_of(name: str, given: Mapping[str, Any]) -> Section:
    """Return the options of an extension from keys with its name. Raises ValidationError."""
    own = {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{name}.")}
    return OPTIONS.get(name, Section).model_validate(own)
