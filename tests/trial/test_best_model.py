"""What an export tells of its encoder."""

from __future__ import annotations

from pathlib import Path

from hpo.models.encoder import MINILM_HUB_ID
from hpo.trial.best_model import encoder_facts


def test_an_encoder_is_named_without_a_path_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "private" / "our-bert"
    folder.mkdir(parents=True)
    assert encoder_facts(str(folder), None) == {"name": "our-bert", "hub_id": None, "revision": None}
    minilm = {"name": MINILM_HUB_ID, "hub_id": MINILM_HUB_ID, "revision": None}
    assert encoder_facts("minilm", None) == minilm
    assert encoder_facts({"model_type": "bert"}, None)["name"] == "a fresh bert"
