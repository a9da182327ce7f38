from __future__ import annotations

import io
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpo.config.checkpoint_config import CheckpointConfig
from hpo.errors import CheckpointError, InputError, OutageError
from hpo.study.artifact_store import open_artifact_store
from hpo.study.checkpoint_artifacts import FolderCheckpoints, _fetch


def lease(saved_step: int) -> Any:
    return SimpleNamespace(saved_step=saved_step)


def test_folder_waits_for_the_checkpoint_that_was_written_elsewhere(tmp_path: Path) -> None:
    """As with a network file system that shows an older state for a while."""
    folder = FolderCheckpoints(lease(120))
    [name] = folder.names("step", "key")
    assert folder.names("best", "key") == []
    path = tmp_path / name
    looking = threading.Thread(target=folder.fetch, args=[path])
    looking.start()
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    looking.join(60)
    assert not looking.is_alive()


def test_folder_says_what_it_cannot_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderCheckpoints, "wait_seconds", 0.0)
    with pytest.raises(CheckpointError, match=r"step-00000120 was written by .* Do the workers share"):
        FolderCheckpoints(lease(120)).fetch(tmp_path / "trial" / "step-00000120")


def test_folder_notes_the_newest(tmp_path: Path) -> None:
    of_trial = lease(0)
    folder = FolderCheckpoints(of_trial)
    assert folder.names("step", "key") == [], "nobody has written one"
    folder.sync([tmp_path / name for name in ("best-00000200", "step-00000090", "step-00000100")], "key")
    assert of_trial.saved_step == 100


def archive(**members: tarfile.TarInfo) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, member in members.items():
            content = name.encode()
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return stream.getvalue()


def test_archive_from_elsewhere_writes_nothing_but_a_checkpoint(tmp_path: Path) -> None:
    store = open_artifact_store(CheckpointConfig(location=f"artifacts:{tmp_path / 'store'}"), create=True)
    link = tarfile.TarInfo("model.safetensors")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    content = archive(
        escape=tarfile.TarInfo("../escaped"),
        absolute=tarfile.TarInfo(str(tmp_path / "absolute")),
        other=tarfile.TarInfo("code.py"),
        link=link,
        state=tarfile.TarInfo("state.pt"),
    )
    (tmp_path / "store" / "a.tar").write_bytes(content)
    _fetch(store, "a.tar", tmp_path / "trial" / "step-00000010")
    assert [path.name for path in (tmp_path / "trial" / "step-00000010").iterdir()] == ["state.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "trial"]


@pytest.mark.parametrize("artifact_id", ["../secret.tar", "/etc/passwd", "a/b.tar", "", ".tar"])
def test_artifact_of_a_strange_name_is_refused(tmp_path: Path, artifact_id: str) -> None:
    store = open_artifact_store(CheckpointConfig(location=f"artifacts:{tmp_path / 'store'}"), create=True)
    with pytest.raises(CheckpointError, match="no name of ours"):
        _fetch(store, artifact_id, tmp_path / "step-00000010")


def test_torn_archive(tmp_path: Path) -> None:
    store = open_artifact_store(CheckpointConfig(location=f"artifacts:{tmp_path / 'store'}"), create=True)
    whole = archive(state=tarfile.TarInfo("state.pt"))
    (tmp_path / "store" / "a.tar").write_bytes(whole[:514])
    for artifact_id in ("a.tar", "gone.tar"):
        with pytest.raises(CheckpointError, match="step-00000010 cannot be read from artifacts:"):
            _fetch(store, artifact_id, tmp_path / "step-00000010")
    assert not (tmp_path / "step-00000010").exists()


def test_store_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for prefix in ("", "artifacts:"):
        with pytest.raises(InputError, match=r"checkpoint\.location: .*file/store cannot be made"):
            open_artifact_store(CheckpointConfig(location=f"{prefix}{tmp_path}/file/store"), create=True)
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with pytest.raises(InputError, match="the bucket 'absent': there is no such bucket"):
            open_artifact_store(CheckpointConfig(location="s3://absent/prefix"))
    finally:
        server.stop()


def test_location_is_relative_to_the_study_file(tmp_path: Path) -> None:
    def of(location: str) -> CheckpointConfig:
        return CheckpointConfig.model_validate({"location": location}, context={"folder": tmp_path})

    def base(config: CheckpointConfig) -> Path:
        return config.folder_of("tiny", "0123456789", Path("runs")).parents[1]

    assert base(of("shared")) == tmp_path / "shared"
    assert of("artifacts:kept").location == f"artifacts:{tmp_path}/kept"
    assert of("s3://bucket/a/b").location == "s3://bucket/a/b"
    for config in (of("artifacts:kept"), of("s3://bucket"), CheckpointConfig()):
        assert base(config) == Path("runs")


@pytest.mark.parametrize(
    "location", ["s3://key:secret@bucket/x", "s3://", "gs://bucket", "s3://b/../c d", " "]
)
def test_other_locations_are_refused(location: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        CheckpointConfig(location=location)


def test_folder_that_is_not_mounted_is_away(tmp_path: Path) -> None:
    """An empty mount point neither takes what belongs there, nor has lost it."""
    config = CheckpointConfig(location=f"artifacts:{tmp_path / 'mnt'}")
    for make in (lambda: None, (tmp_path / "mnt").mkdir):
        make()
        with pytest.raises(InputError, match=r"it has no file \.hpo-artifacts\. Mount it here"):
            open_artifact_store(config)
    store = open_artifact_store(config, create=True)
    content = tmp_path / "content"
    content.write_text("archive")
    store.write("a.tar", content)
    (tmp_path / "mnt").rename(tmp_path / "elsewhere")
    (tmp_path / "mnt").mkdir()
    for use in (
        lambda: store.write("b.tar", content),
        lambda: store.remove("a.tar"),
        lambda: store.extract("a.tar", tmp_path),
    ):
        with pytest.raises(OutageError, match="is not mounted here"):
            use()
    assert not list((tmp_path / "mnt").iterdir())
