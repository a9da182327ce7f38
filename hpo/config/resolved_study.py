"""A study on the device of this process: its file does not decide everything.

StudyConfig + DeviceInfo -> ResolvedStudy -> the parts of each trial
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hpo.config.study_config import StudyConfig
from hpo.device import DeviceInfo
from hpo.precision.table import AmpConfig, apply_preset


@dataclass(frozen=True)
class ResolvedStudy:
    """A study with the choices that depend on the device."""

    config: StudyConfig
    device: DeviceInfo
    amp: AmpConfig
    """The study's, with its preset applied and the memory fraction of this process."""
    preset_precision: str
    """The precision of a study that neither fixes nor searches one."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that trials may have here."""
        return self.config.precisions or (self.preset_precision,)

    def with_amp(self, **changes: Any) -> ResolvedStudy:
        """Return the study with other values in `amp`."""
        return replace(self, amp=self.amp.model_copy(update=changes))


def resolve_study(config: StudyConfig, device: DeviceInfo) -> ResolvedStudy:
    """Resolve a study for a device.

    Raises InputError if the study has TF32 and the device is an AMD GPU.
    """
    return ResolvedStudy(config, device, *apply_preset(config.amp, device))
