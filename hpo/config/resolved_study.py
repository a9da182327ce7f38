"""A study on the device of this process, which decides what the study file leaves open.

StudyConfig + DeviceInfo -> ResolvedStudy -> parts of each trial
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hpo.config.study_config import StudyConfig
from hpo.device import DeviceInfo
from hpo.precision.table import AmpConfig, apply_preset


@dataclass(frozen=True)
class ResolvedStudy:
    """A study with the choices for a device."""

    config: StudyConfig
    device: DeviceInfo
    amp: AmpConfig
    """`amp` of the study, with its preset applied and the memory fraction of this process."""
    preset_precision: str
    """Precision for a study that neither fixes nor searches one."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Possible precisions of trials on this device."""
        return self.config.precisions or (self.preset_precision,)

    def with_amp(self, **changes: Any) -> ResolvedStudy:
        """Return a copy with other values in `amp`."""
        return replace(self, amp=self.amp.model_copy(update=changes))


def resolve_study(config: StudyConfig, device: DeviceInfo) -> ResolvedStudy:
    """Resolve a study for a device. Raises InputError for TF32 on an AMD GPU."""
    return ResolvedStudy(config, device, *apply_preset(config.amp, device))
