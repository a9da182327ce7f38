"""What may heal a trial that broke, tried in the order of how little it changes.

Parts in fp32 are tried by themselves, the smallest that the broken operator lies in first. Where none heals,
the part of what breaks next is added to the smallest, and so on. Where these do not heal what the
compatibility check found, the smallest set of parts that does is looked for (`hpo.trial.smallest_parts`).
Then come a smaller loss scale, with a floor (`amp.min_scale`) under it, bf16, stronger clipping, fp32, and a
lower learning rate; the last two tell whether the precision is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpo.config.trial_config import TrialConfig
from hpo.config.trial_settings import OVERRIDE
from hpo.errors import InputError, TrialEnd
from hpo.models.multitask import MultitaskModel
from hpo.precision.table import PRECISION, Resolution
from hpo.trial.replay import BadStep
from hpo.trial.smallest_parts import smallest_parts
from hpo.trial.tracing import Origin

AMP = "amp."
"""Begins a setting of the study's `amp` among those that are tried."""

SCALE_FACTOR, CLIP_FACTOR, RATE_FACTOR = 64.0, 10.0, 10.0
"""What the loss scale, the norm of the gradients and the learning rate are divided by."""
MAX_PARTS = 6
"""Parts that are put in fp32 one after the other."""


@dataclass(frozen=True)
class Remedy:
    """Settings that were tried in place of the trial's."""

    settings: dict[str, Any]
    heals: bool
    result: str
    """What came of it."""


@dataclass(frozen=True)
class Broken:
    """How an attempt ended badly."""

    what: str
    """What was not finite (`loss`, `gradients`, `logits`), or `raised`, or `far` from fp32."""
    origin: Origin | None
    parts: tuple[str, ...]
    """That the origin lies in, the smallest first."""
    text: str


def try_remedies(
    config: TrialConfig,
    resolution: Resolution,
    first: Broken,
    at: BadStep | MultitaskModel,
    attempt: Callable[[Mapping[str, Any]], Broken | str],
    say: Callable[[str], None],
) -> Iterator[Remedy]:
    """Try the remedies for a trial of `config` that broke as `first` says.

    `attempt` is given settings and says how it broke with them, or in words how well it went. `at` is the
    step of the training, or the model that the compatibility check refused.
    """
    bad = at if isinstance(at, BadStep) else None

    def remedy(settings: dict[str, Any]) -> tuple[Remedy, Broken | None]:
        say(f"trying {shown(settings)}")
        try:
            came = attempt(settings)
        except (TrialEnd, InputError) as error:
            return Remedy(settings, heals=False, result=f"not tried: {error}"), None
        if isinstance(came, str):
            return Remedy(settings, heals=True, result=came), None
        return Remedy(settings, heals=False, result=came.text), came

    asked: dict[tuple[str, ...], tuple[Remedy, Broken | None]] = {}

    def in_float32(*parts: str) -> tuple[Remedy, Broken | None]:
        if parts not in asked:
            asked[parts] = remedy({f"{OVERRIDE}{part}": "fp32" for part in parts})
        return asked[parts]

    given = config.float32_parts
    chosen, broken, healed = [*given], first, resolution.effective == "fp32"
    while not healed and len(chosen) < MAX_PARTS + len(given):
        new = [part for part in broken.parts if part not in chosen][:1]
        if not new:
            break
        chosen += new
        tried, then = in_float32(*chosen)
        healed = tried.heals
        yield tried
        if broken is first and not healed:
            for part in first.parts[1:]:
                larger, _ = in_float32(*given, part)
                healed |= larger.heals
                yield larger
        if then is None:
            break
        broken = then
    if isinstance(at, MultitaskModel) and not healed:
        found = smallest_parts(at, lambda parts: in_float32(*_joined(given, parts))[0].heals)
        if found is not None:
            yield in_float32(*_joined(given, found))[0]
    for settings in _other_remedies(config, resolution, bad):
        yield remedy(settings)[0]


def _other_remedies(
    config: TrialConfig, resolution: Resolution, bad: BadStep | None
) -> Iterator[dict[str, Any]]:
    precision = resolution.precision
    if precision.loss_scaling:
        floor = config.amp.min_scale
        scale = (bad.scale if bad and bad.scale else floor) / SCALE_FACTOR
        # At its floor the scaler could not skip a step any more.
        lower = {f"{AMP}min_scale": scale / SCALE_FACTOR} if scale <= floor else {}
        yield {"init_scale": scale, **lower}
    if precision.linear_dtype != "float32" and resolution.effective != "bf16":
        yield {PRECISION: "bf16"}
    if bad is not None:
        yield {"max_grad_norm": config.max_grad_norm / CLIP_FACTOR if config.max_grad_norm else 1.0}
    if precision.linear_dtype != "float32":
        yield {PRECISION: "fp32"}
    if bad is not None:
        yield {"learning_rate": config.learning_rate / RATE_FACTOR}


def _joined(given: Iterable[str], parts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys((*given, *parts)))


def shown(settings: Mapping[str, Any]) -> str:
    """As in a study file."""
    texts = {name: f"{value:g}" if isinstance(value, float) else value for name, value in settings.items()}
    return ", ".join(f"{name}: {text}" for name, text in texts.items())
