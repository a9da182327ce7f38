"""Settings and parts of a trial with its own training loop."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hpo.config.study_config import StudyConfig
from hpo.config.trial_settings import OWN_LOOP_SETTINGS
from hpo.device import DeviceInfo
from hpo.errors import InputError
from hpo.precision.table import AmpConfig, Resolution


class Params(Mapping[str, Any]):
    """The settings of a trial by name. It notes the settings that are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._unread = {*values} - {*OWN_LOOP_SETTINGS}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            known = ", ".join(self._values)
            raise InputError(
                f"run.params: the study must fix `{name}` under `training` or search it in `search_space` "
                f"(`hpo train` also needs --param {name}=VALUE), but it has {known}. Where a `when` leaves a "
                "setting out, use run.params.get(...)."
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
        """The names of the function's own settings that nothing has read."""
        return sorted(self._unread)


@dataclass(frozen=True)
class OwnConfig:
    """The settings of a trial with its own loop."""

    params: Params
    seed: int
    max_grad_norm: float | None
    amp: AmpConfig


@dataclass(frozen=True)
class OwnParts:
    """The parts of such a trial before its function runs. The names are those of `TrialParts`."""

    study: StudyConfig
    device: DeviceInfo
    config: OwnConfig
    resolution: Resolution
    model: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    """The modules that the function keeps."""
