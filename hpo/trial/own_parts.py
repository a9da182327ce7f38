"""The settings of a trial whose loop is the study's own, and its precision on this device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from hpo.config.resolved_study import ResolvedStudy
from hpo.config.search_space import decode
from hpo.config.study_config import StudyConfig
from hpo.config.trial_settings import OWN_LOOP_SETTINGS, TrialSettings
from hpo.device import DeviceInfo
from hpo.errors import InputError
from hpo.precision.environment import environment_overrides
from hpo.precision.table import PRECISION, AmpConfig, Resolution, resolve, support


class Params(Mapping[str, Any]):
    """The settings of a trial by name. It notes which are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._unread = {*values} - {*OWN_LOOP_SETTINGS}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            known = ", ".join(self._values)
            raise InputError(
                f"run.params: the study must fix `{name}` under `training` or search it in `search_space`, "
                f"but it has {known}. Where a `when` leaves a setting out, use run.params.get(...)."
            )
        self._unread.discard(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    @property
    def unread(self) -> list[str]:
        """The names of the settings of the function's own that nothing has read."""
        return sorted(self._unread)


@dataclass(frozen=True)
class OwnConfig:
    """The settings of a trial whose loop is the study's own."""

    params: Params
    seed: int
    max_grad_norm: float | None
    amp: AmpConfig


@dataclass(frozen=True)
class OwnParts:
    """What is known of such a trial before its function runs. The names are those of `TrialParts`."""

    study: StudyConfig
    device: DeviceInfo
    config: OwnConfig
    resolution: Resolution
    model: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    """The modules that the function keeps."""


def build_own_parts(
    resolved: ResolvedStudy, params: Mapping[str, Any], note: Callable[..., None] = lambda **_: None
) -> OwnParts:
    """Resolve the settings and the precision of a trial; `note` is told of the precision.

    Raises the TrialEnd of a precision that cannot run here.
    """
    study, device = resolved.config, resolved.device
    fixed = study.training.model_dump(exclude_unset=True)
    own = fixed.pop("option", {})
    values = {**fixed, **own, **decode(study.search_space, params)}
    known = TrialSettings.model_validate({key: values[key] for key in OWN_LOOP_SETTINGS if key in values})
    requested = known.fp_precision or resolved.preset_precision
    amp = resolved.amp
    if known.init_scale is not None:
        amp = amp.model_copy(update={"init_scale": known.init_scale})
    note(precision={"requested": requested, "effective": None, "support": support(requested, device).level})
    resolution = resolve(requested, device, amp)
    note(precision=asdict(resolution), environment=environment_overrides())
    services = known.model_dump(include={*OWN_LOOP_SETTINGS}) | {PRECISION: requested}
    config = OwnConfig(Params({**values, **services}), known.seed, known.max_grad_norm, amp)
    return OwnParts(study, device, config, resolution)
