"""What is said of a deployment: verdicts by what was found, tables in a terminal, and the card's section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpo.cli import display
from hpo.deploy.artifacts import ARTIFACTS
from hpo.deploy.float_layers import FloatLayers
from hpo.deploy.result import DeployedArtifact, Deployment
from hpo.deploy.timing import SpeedUp, Timing
from hpo.evaluation.intervals import Interval
from hpo.report.deployed import card_section, latency_charts, latency_table, loading, sentences, verdict
from hpo.report.deployment_page import deployment_html


def found(chosen: str = "onnx_int8_dynamic", **changes: Any) -> dict[str, Any]:
    """A deployment with every artifact of a model of two tasks, the later the faster."""
    artifacts = []
    for place, artifact in enumerate(ARTIFACTS):
        speed = SpeedUp(1 + place / 10, 1 + place / 10, 1 + place / 5)
        timing = Timing(20.0 - place, 30.0, 100, speed)
        interval = Interval(0.9, 0.88, 0.92)
        artifacts.append(
            DeployedArtifact(
                trial=0,
                artifact=artifact,
                folder=artifact.name,
                verdict="as_good",
                reason="",
                weight_bytes=91_012_345 if place < 4 else 22_800_000,
                folder_bytes=92_000_000,
                score=interval,
                drop=Interval(0.1, -0.25, 0.45),
                largest_change=0.01,
                metrics={name: {"f1_micro": interval} for name in ("intent", "slots")},
                task_drops=dict.fromkeys(("intent", "slots"), Interval(-1.23, -2.5, 0.5)),
                timings={1: timing, 32: timing},
            )
        )
    names = [artifact.name for artifact in ARTIFACTS]
    deployment = Deployment(
        study="banking",
        split="test",
        num_examples=1234,
        objective="score",
        unit="points",
        max_drop=1.0,
        batch_size=1,
        num_threads=2,
        device={"type": "cpu", "name": "AMD EPYC", "features": ["avx2"]},
        versions={"torch": "2.13.0"},
        artifacts=tuple(artifacts),
        chosen=names.index(chosen),
        left_out={},
    )
    return deployment.as_json() | changes


def with_layers(verdict: str, *, is_smallest: bool = True) -> str:
    """What is said of an int8 model with a layer in float."""
    content = found()
    mended = FloatLayers(("encoder.layer.0",), 7, is_smallest)
    changes = {"float_layers": ["encoder.layer.0"], "verdict": verdict}
    content["artifacts"][4] |= changes | {
        "mended": {"is_smallest": mended.is_smallest, "num_quantizations": 7}
    }
    (told,) = (sentence for sentence in sentences(content) if "encoder.layer.0" in sentence)
    return told


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_and_units_are_whole_in_a_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "Console", lambda **given: Console(width=width, **given))
    display.print_deployment(found(), Path("runs/banking/deploy"))
    screen = capsys.readouterr().out
    tables, _, _ = screen.partition("fp16:")
    assert max(map(len, tables.splitlines())) <= width
    told = screen.replace("\u00a0", " ")
    assert told.count("91.0 MB") == 4
    assert told.count("22.8 MB") == 4
    assert "by task: the primary metric; drops in points" in told
    assert told.count("-1.23 [-2.50,") == 14
    assert 'hpo.load("runs/banking/deploy/model", device="cpu")' in told


def test_sizes_keep_three_digits_or_more() -> None:
    content = found()
    content["artifacts"][0]["weight_bytes"] = 438_012_345
    assert list(latency_table(content)["weights"][:2]) == ["438\u00a0MB", "91.0\u00a0MB"]


def test_the_model_is_loaded_where_it_was_scored() -> None:
    assert loading(found("fp32"), "model") == 'hpo.load("model", device="cpu")'
    gpu = {"type": "cuda", "name": "NVIDIA L4", "features": []}
    assert loading(found("bf16", device=gpu), "model") == 'hpo.load("model")'
    page = deployment_html(found(), "model")
    assert "hpo.load(&#34;model&#34;, device=&#34;cpu&#34;)" in page


def test_layers_in_float_are_worded_by_their_verdict_on_the_split() -> None:
    assert "layers in float that mend it: encoder.layer.0 (none of these layers" in with_layers("as_good")
    for verdict_on_test in ("worse", "undecided"):
        assert "mend it on the rows they were found by, but not surely on test" in with_layers(
            verdict_on_test
        )
    assert "the time given has ended; 7 models in int8" in with_layers("as_good", is_smallest=False)


def test_fp32_is_chosen_though_others_are_faster() -> None:
    assert verdict(found("fp32")).endswith("ms a batch of 1 (median), nothing faster is as good.")


def test_what_is_no_smaller_is_said() -> None:
    assert sentences(found())[0] == "bf16 and fp16: the weights are stored in fp32, which they compute from."
    content = found()
    content["artifacts"] = content["artifacts"][:1]
    assert sentences(content) == []


@pytest.mark.parametrize(("objective", "corner"), [("score", "Upper left"), ("price/mae", "Lower left")])
def test_the_better_corner_of_the_chart(objective: str, corner: str) -> None:
    captions = [chart.caption for chart in latency_charts(found(objective=objective))]
    assert all(caption.endswith(f"{corner} is better.") for caption in captions)
    assert len(captions) == 2


def test_the_card_has_what_was_measured() -> None:
    section = card_section(found()).replace("\u00a0", " ")
    assert "| artifact | onnx_int8_dynamic |" in section
    assert "| score on 1,234 rows of test | 0.9000 [0.8800, 0.9200] |" in section
    assert "| drop of fp32's, points | +0.10 [-0.25, +0.45] |" in section
    assert "| 1 text | 16 / 30 |" in section
    assert "| speed, 1 text | 1.40 [1.40, 1.80] |" in section
    assert "| weights | 22.8 MB |" in section
    assert "| timed on | AMD EPYC, 2 threads |" in section
    assert "drop of fp32" not in card_section(found("fp32"))
