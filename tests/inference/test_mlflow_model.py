"""An export as a model of MLflow, loaded and served by MLflow itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pandas as pd
import pytest
import torch
from support.tiny_encoders import KIND_TASKS, make_model
from support.waiting import wait_for

import hpo
from hpo.cluster.postgres.postgres_server import free_port
from hpo.errors import DataError
from hpo.models import export
from hpo.models.encoder import load_tokenizer
from hpo.models.export import MLFLOW_FILES, ExportSettings, export_model
from hpo.tasks.tokenized_split import Windowing

# MLflow warns of its own types as it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning")
TEXTS = ["late again", "Ann paid too much for it in Rome " * 3]
PAIR: dict[str, Any] = {"text": "Where ? In Rome", "segments": {"question": [0, 5], "context": [8, 15]}}


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def exported(folder: Path, pair: tuple[str, str] | None = None) -> Path:
    decisions: dict[str, Any] = {task.name: {} for task in KIND_TASKS}
    settings = ExportSettings(
        windowing=Windowing(16, pair_segments=pair), attention="sdpa", precision="fp32", decisions=decisions
    )
    return export_model(make_model(tasks=KIND_TASKS), load_tokenizer("minilm"), folder, settings)


def of_hpo(folder: Path, texts: list[Any], **options: Any) -> Any:
    """Return the predictions of `hpo.load` as JSON would have them."""
    predictions = hpo.load(folder, **options).predict(texts)
    return json.loads(
        json.dumps([{task: vars(one) for task, one in each.items()} for each in predictions], default=vars)
    )


def test_mlflow_predicts_as_hpo_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    folder = exported(tmp_path / "model")
    model = mlflow.pyfunc.load_model(str(folder))
    rows = model.predict(pd.DataFrame({"text": TEXTS, "other": 1}))
    assert rows == of_hpo(folder, TEXTS)
    assert {"label", "scores", "spans"} == rows[0]["single"].keys()
    with pytest.raises(DataError, match=r"texts\[1\]: `text` is empty"):
        model.predict(pd.DataFrame({"text": ["late", " "]}))
    monkeypatch.setenv("MLFLOW_PYFUNC_INFERENCE_CONFIG", '{"precision": "bf16"}')
    reduced = mlflow.pyfunc.load_model(str(folder))
    assert rows != reduced.predict(pd.DataFrame({"text": TEXTS})) == of_hpo(folder, TEXTS, precision="bf16")


def test_pairs_have_their_segments(tmp_path: Path) -> None:
    import mlflow

    folder = exported(tmp_path / "model", ("question", "context"))
    model = mlflow.pyfunc.load_model(str(folder))
    assert model.predict(pd.DataFrame([PAIR])) == of_hpo(folder, [PAIR])
    columns = pd.DataFrame({"question": ["Where"], "context": ["In Rome"]})
    assert model.predict(columns) == of_hpo(folder, [("Where", "In Rome")])
    with pytest.raises(DataError, match="segments"):
        model.predict(pd.DataFrame({"text": TEXTS}))


def test_nothing_is_written_without_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_mlflow = {path.name: path.read_bytes() for path in exported(tmp_path / "with").iterdir()}
    assert f"torch=={torch.__version__}\n" in with_mlflow["requirements.txt"].decode()
    monkeypatch.setattr(export, "find_spec", lambda _: None)
    without = {path.name: path.read_bytes() for path in exported(tmp_path / "without").iterdir()}
    assert with_mlflow.keys() - without.keys() == set(MLFLOW_FILES)
    assert without["hpo.json"] == with_mlflow["hpo.json"], "no checksum of the files for MLflow"


@pytest.mark.slow
def test_server_of_mlflow_answers(tmp_path: Path) -> None:
    folder, port = exported(tmp_path / "model"), free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(folder), "--env-manager", "local"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": tmp_path}
    # MLflow starts uvicorn by its name.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(hpo.__file__).parents[1])}
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env=environment,
        start_new_session=True,
        **options,
    )

    def answers() -> bool:
        assert server.poll() is None, server.communicate()[0]
        try:
            with urlopen(f"{url}/ping", timeout=5):
                return True
        except OSError:
            return False

    def post(rows: list[dict[str, Any]]) -> Any:
        body, head = json.dumps({"dataframe_records": rows}).encode(), {"Content-Type": "application/json"}
        with urlopen(Request(f"{url}/invocations", body, head), timeout=60) as answer:
            return json.load(answer)["predictions"]

    try:
        wait_for(answers, seconds=120)
        rows = post([{"text": text} for text in TEXTS])
        assert rows == of_hpo(folder, TEXTS)
        with pytest.raises(HTTPError) as refused:
            post([{"text": ""}])
        assert (refused.value.code, b"`text` is empty" in refused.value.read()) == (400, True)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, 15)
        server.wait(30)
        server.stdout.close()
