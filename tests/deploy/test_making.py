"""The folders of artifacts."""

from __future__ import annotations

import json
from pathlib import Path

from planted_int8 import write_mood_study
from test_deployment import trained

from hpo.config.study_config import load_study
from hpo.deploy.artifacts import REFERENCE
from hpo.deploy.making import Workshop
from hpo.device import probe_device
from hpo.models.encoder import attention_on
from hpo.trial.executor import Executor


def test_a_model_trained_with_flash_attention_is_deployed_on_a_cpu(tmp_path: Path) -> None:
    executor = Executor(load_study(write_mood_study(tmp_path)), probe_device("cpu"), tmp_path / "runs")
    exported = trained(executor, tmp_path, attention="flash").exported
    assert json.loads((exported / "hpo.json").read_text())["attention"] == "flash"
    workshop = Workshop(exported, tmp_path / "artifacts", (), "cpu", trusted=False)
    (prediction,) = workshop.load(REFERENCE).predict(["a good day"])
    assert prediction["mood"].label == "good"
    assert json.loads((workshop.make(REFERENCE) / "hpo.json").read_text())["attention"] == "sdpa"
    assert [attention_on("cuda", name) for name in ("flash", "sdpa")] == ["flash", "sdpa"]
    assert attention_on("cpu", "eager") == "eager"
