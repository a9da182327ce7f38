"""An encoder with an overflow in fp16: searched, trained and compared with fp32."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from support.planted_encoder import PlantedEncoder, write_planted_study
from torch import Tensor, nn

import hpo

MODULE = "encoder.layers.0.dense.0"


class Scale(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * 2.0**-20


def overflowing(*_: object, **__: object) -> PlantedEncoder:
    """Build the sound encoder with a first layer of a million times its values, divided again."""
    encoder = PlantedEncoder("sound")
    layer = encoder.layers[0]
    with torch.no_grad():
        layer.dense.weight.mul_(2.0**20)
    layer.dense = nn.Sequential(layer.dense, Scale())
    return encoder


def test_fp16_with_the_module_in_fp32_is_compared_with_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(write_planted_study(tmp_path).read_text())
    content["training"] |= {"fp32_parts": "auto", "learning_rate": 0.05, "init_scale": 256.0}
    del content["training"]["fp_precision"]
    content["search_space"] = {"fp_precision": {"type": "categorical", "choices": ["fp32", "fp16"]}}
    study = hpo.Study(content, storage=f"sqlite:///{tmp_path}/hpo.db", quiet=True)
    with mock.patch("hpo.trial.parts.load_encoder", side_effect=overflowing):
        assert study.run().outcomes == {"complete": 2}
        found = study.compare(precisions=("fp32", "fp16"), top=1)
    (trial,) = [one for one in study.record.trials if one.params["fp_precision"] == "fp16"]
    record = trial.telemetry["fp32_parts"]
    assert record["resolved"] == [MODULE]
    assert (record["verdict_without"], record["verdict"]) == ("incompatible", "ok")
    assert record["by_part"][MODULE]["observed"] == {"float32": 1}
    assert record["by_part"]["others"]["observed"].keys() == {"float16"}
    assert trial.telemetry["precision"]["agrees"]
    (verdict,) = found["verdicts"]
    assert verdict["precision"] == "fp16"
    assert verdict["num_rows"] == 1000
    assert verdict["fp32"] > 90, "fp32 has learned the task"
    assert verdict["verdict"] == "as_good", verdict["sentence"]
