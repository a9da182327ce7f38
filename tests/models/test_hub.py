import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
from support.tiny_encoders import save_encoder

from hpo.errors import ModelError
from hpo.models import hub
from hpo.models.encoder import load_encoder, load_tokenizer

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Hub with the files of one folder, and an empty cache."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.snapshot = folder, cache / "models--someone--tiny" / "snapshots" / SHA
        self.snapshot.mkdir(parents=True)
        reference = cache / "models--someone--tiny" / "refs" / "main"
        reference.parent.mkdir()
        reference.write_text(SHA)
        files = [SimpleNamespace(rfilename=file.name) for file in folder.iterdir()]
        self.model_info = Mock(return_value=SimpleNamespace(siblings=files))
        self.snapshot_download = Mock(side_effect=self.download)

    def download(self, _: str, *, allow_patterns: list[str], **__: Any) -> str:
        for file in self.folder.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, self.snapshot)
        return str(self.snapshot)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = save_encoder(tmp_path / "served")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    fake = FakeHub(folder, tmp_path / "cache")
    monkeypatch.setattr(hub, "HfApi", lambda: fake)
    monkeypatch.setattr(hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_hub_model_is_downloaded_once(fake_hub: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        load_tokenizer("someone/tiny")
        load_encoder("someone/tiny")
    asked = fake_hub.model_info
    asked.assert_called_once_with("someone/tiny", revision=None, timeout=hub.TIMEOUT_SECONDS)
    fake_hub.snapshot_download.assert_called_once()
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in fake_hub.snapshot.iterdir()} == names
    assert capfd.readouterr() == ("", "")


def test_incomplete_cache_asks_the_hub_once(fake_hub: FakeHub) -> None:
    fake_hub.model_info.side_effect = OSError("no route to host")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(fake_hub.folder / name, fake_hub.snapshot)
    with pytest.raises(ModelError, match=r"the hub does not give it: no route to host.* `model.revision`"):
        load_encoder("someone/tiny")
    shutil.copy(fake_hub.folder / "model.safetensors", fake_hub.snapshot)
    load_encoder("someone/tiny")
    fake_hub.model_info.assert_called_once()
    fake_hub.snapshot_download.assert_not_called()
