"""What an export tells of its encoder."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.models.encoder import MINILM_HUB_ID
from hpo.trial.provenance import encoder_facts, license_of


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("README.md", "---\nlicense: mit\nlanguage: en\n---\n# A model\n", "mit"),
        ("README.md", "---\r\nlicense: apache-2.0\r\n---\r\n", "apache-2.0"),
        ("README.md", "# A model\nlicense: mit\n", None),
        ("README.md", "---\nlicense: [\n---\n", None),
        ("README.md", "---\njust words\n---\n", None),
        ("config.json", "{}", None),
    ],
)
def test_the_licence_is_what_the_files_tell(
    tmp_path: Path, name: str, content: str, expected: str | None
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert license_of(tmp_path) == expected


def test_an_encoder_is_named_without_a_path_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "private" / "our-bert"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    nothing = {"revision": None, "license": None}
    assert encoder_facts(str(folder), None) == {"name": "our-bert", "hub_id": None, **nothing}
    minilm = {"name": MINILM_HUB_ID, "hub_id": MINILM_HUB_ID, "revision": None, "license": "apache-2.0"}
    assert encoder_facts("minilm", None) == minilm
    assert encoder_facts({"model_type": "bert"}, None)["name"] == "a fresh bert"


def test_an_encoder_that_is_gone_has_no_licence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    facts = encoder_facts("nobody/gone", "v1")
    assert facts == {"name": "nobody/gone", "hub_id": "nobody/gone", "revision": "v1", "license": None}
