from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpo.config.trial_config import TrialConfig
from hpo.errors import RunError
from hpo.precision.table import AmpConfig
from hpo.trial.best_model import stored_config


def test_settings_of_a_checkpoint_of_an_earlier_version_are_read_where_they_mean_the_same() -> None:
    config = TrialConfig(encoder="minilm", fp_precision="bf16", amp=AmpConfig())
    content = config.model_dump(mode="json")
    former = {"precision_overrides": {}, "weight_rounding": "nearest"}
    assert stored_config(Path("trial"), json.dumps(content | former)) == config
    for change in ({"precision_overrides": {"heads": "fp32"}}, {"weight_rounding": "compensated"}):
        with pytest.raises(RunError, match=f"in trial is of another version of hpo: {next(iter(change))}: "):
            stored_config(Path("trial"), json.dumps(content | former | change))
