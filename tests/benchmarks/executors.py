"""The executor of a workload's study, for programs that run its trials themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from workload import Workload, study_content

from hpo.config.study_config import load_study
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.device import probe_device
from hpo.trial.executor import Executor


def executor_of(
    data: Path,
    workload: Workload,
    precision: str = "fp32",
    *,
    work: Path | None = None,
    device: str = "cpu",
    **training: Any,
) -> Executor:
    """The executor of the workload's study with these settings of a trial, working in `work` or in `data`."""
    work = work or data
    path = work / "study.yaml"
    path.write_text(yaml.safe_dump(study_content(workload, data, precision, device=device, **training)))
    return Executor(load_study(str(path)), probe_device(device), work / "runs")


def config_of(executor: Executor, seed: int, precision: str = "fp32") -> TrialConfig:
    return build_trial_config(executor.study, {"seed": seed}, precision, executor.amp)
