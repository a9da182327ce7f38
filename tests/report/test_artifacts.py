from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from browser import open_chromium
from detailed_documents import document, error, every_kind, single_label
from optuna.artifacts import get_all_artifact_meta
from optuna.artifacts.exceptions import ArtifactNotFound
from test_dashboard import serving
from worker_process import result, study

from hpo.errors import InputError, RunError
from hpo.report.artifacts import DashboardFiles, files_folder, files_folders, publish_artifacts, remove_files
from hpo.report.dashboard import publish
from hpo.study.claims.leases import WorkerLease
from hpo.study.reading.detailed_evaluations import store_detailed_evaluation
from hpo.study.reading.reader import read_study
from hpo.study.store import optuna_internals
from hpo.study.store.lifecycle import delete_study
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

HOSTILE = "<script>document.title='hacked'</script>"


@contextmanager
def two_trials(url: str) -> Iterator[Storage]:
    """With the study `tiny`: trial 1 is the best."""
    with open_storage(url) as storage:
        opened = create_or_resume_study(storage, study(n_trials=2))
        with WorkerLease(storage, opened, max_retries=0) as worker:
            for value in (0.2, 0.7):
                lease = worker.claim()
                assert lease is not None
                trial = worker.open_trial(lease)
                assert trial is not None
                worker.record_outcome(lease, trial, result("complete", values=(value,)))
        yield storage


@pytest.fixture
def database(storage_url: str) -> Iterator[Storage]:
    with two_trials(storage_url) as storage:
        yield storage


@pytest.fixture
def local(sqlite_url: str) -> Iterator[Storage]:
    with two_trials(sqlite_url) as storage:
        yield storage


def evaluate_in_detail(storage: Storage, number: int, found: dict[str, Any]) -> None:
    assert store_detailed_evaluation(storage, "tiny", storage.study_token("tiny"), number, found)


def publish_all(storage: Storage, runs_dir: Path) -> None:
    publish_artifacts(storage, read_study(storage, "tiny"), runs_dir)


def listed(storage: Storage, number: int) -> dict[str, str]:
    """The ids of a trial's artifacts by their names, as Optuna lists them."""
    with open_storage(storage.url) as opened:  # one that is open keeps finished trials as it has seen them
        trial = opened.load_study("tiny").get_trials()[number]
        found = get_all_artifact_meta(trial, storage=opened.optuna)
    return {one.filename: one.artifact_id for one in found}


def files(storage: Storage, runs_dir: Path) -> set[str]:
    return {path.name for path in files_folder(storage, "tiny", runs_dir).glob("*")}


def test_the_best_trial_gets_page_document_and_errors(database: Storage, tmp_path: Path) -> None:
    evaluate_in_detail(database, 1, every_kind())
    publish_all(database, tmp_path)
    found = listed(database, 1)
    assert found.keys() == {"test-evaluation.html", "test-evaluation.json", "test-worst-errors.csv"}
    assert files(database, tmp_path) == set(found.values())
    assert listed(database, 0) == {}
    store = DashboardFiles(tmp_path)
    with store.open_reader(found["test-evaluation.json"]) as file:
        assert json.load(file) == every_kind()
    with store.open_reader(found["test-worst-errors.csv"]) as file:
        assert file.readline() == b"number,split,task,id,loss,truth,predicted,text,text_start\n"


def test_published_again_they_take_the_place_of_the_former(database: Storage, tmp_path: Path) -> None:
    evaluate_in_detail(database, 1, every_kind())
    trial_id = database.load_study("tiny").get_trials()[1]._trial_id
    theirs = {"artifact_id": "x", "filename": "theirs.txt", "mimetype": "text/plain", "encoding": None}
    with database.engine.begin() as connection:
        table = optuna_internals.system_attributes
        optuna_internals.write_attributes(connection, table, trial_id, {"artifacts:x": json.dumps(theirs)})
    publish_all(database, tmp_path)
    first = listed(database, 1)
    evaluate_in_detail(database, 1, document({}, "test"))
    publish_all(database, tmp_path)
    second = listed(database, 1)
    assert second.keys() == {
        "theirs.txt",
        "test-evaluation.html",
        "test-evaluation.json",
        "test-worst-errors.csv",
    }
    assert second.items() <= first.items()
    assert files(database, tmp_path) == set(second.values()) - {"x"}
    with DashboardFiles(tmp_path).open_reader(second["test-evaluation.json"]) as file:
        assert json.load(file)["tasks"] == {}


def test_a_trial_that_is_the_best_no_more_loses_them(database: Storage, tmp_path: Path) -> None:
    evaluate_in_detail(database, 1, document({}))
    publish_all(database, tmp_path)
    table = optuna_internals.values
    with database.engine.begin() as connection:
        connection.execute(sa.update(table).where(table.c.value == 0.2).values(value=0.9))
    publish_all(database, tmp_path)
    assert listed(database, 1) == {}
    assert files(database, tmp_path) == set()
    evaluate_in_detail(database, 0, document({}))
    publish_all(database, tmp_path)
    assert "test-evaluation.html" in listed(database, 0)


def test_what_somebody_removed_in_the_dashboard_does_not_stop_us(database: Storage, tmp_path: Path) -> None:
    """It leaves a null in the place of an artifact."""
    trial_id = database.load_study("tiny").get_trials()[1]._trial_id
    with database.engine.begin() as connection:
        optuna_internals.write_attributes(
            connection, optuna_internals.system_attributes, trial_id, {"artifacts:gone": json.dumps(None)}
        )
    evaluate_in_detail(database, 1, document({}))
    publish_all(database, tmp_path)
    assert len(files(database, tmp_path)) == 3


def test_a_deleted_study_leaves_neither_rows_nor_files(database: Storage, tmp_path: Path) -> None:
    evaluate_in_detail(database, 1, document({}))
    publish_all(database, tmp_path)
    folder = files_folder(database, "tiny", tmp_path)
    assert folder.is_dir()
    delete_study(database, "tiny")
    remove_files(folder)
    assert not folder.exists()
    remove_files(folder)
    with database.engine.connect() as connection:
        assert connection.execute(sa.select(optuna_internals.system_attributes)).all() == []


def test_files_of_an_earlier_study_of_the_name_go(local: Storage, tmp_path: Path) -> None:
    """They hold texts of its test split."""
    evaluate_in_detail(local, 1, document({}))
    earlier = tmp_path / "tiny" / "dashboard-0123abcd"
    other = tmp_path / "other" / "dashboard-0123abcd"
    for folder in (earlier, other):
        folder.mkdir(parents=True)
        (folder / "page").write_text("texts")
    publish_all(local, tmp_path)
    assert files_folders("tiny", tmp_path) == [files_folder(local, "tiny", tmp_path)]
    assert other.is_dir()
    assert len(files(local, tmp_path)) == 3


def test_a_file_in_the_way_is_one_clear_message(database: Storage, tmp_path: Path) -> None:
    evaluate_in_detail(database, 1, document({}))
    (tmp_path / "tiny").write_text("not a folder")
    with pytest.raises(RunError, match=r"dashboard's files could not be written to .*: Not a directory"):
        publish_all(database, tmp_path)
    assert listed(database, 1) == {}


def test_a_store_gives_only_what_is_an_artifact(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny" / "dashboard-abc"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    known = "0f8fad5b-d9cb-469f-a165-70867728950e"
    (folder / known).write_text("known")
    (folder / "other").write_text("other")
    store = DashboardFiles(tmp_path / "runs")
    with store.open_reader(known) as file:
        assert file.read() == b"known"
    for name in ("../../../secret", str(tmp_path / "secret"), "other", "*", known[:-1] + "?"):
        with pytest.raises(ArtifactNotFound):
            store.open_reader(name)
        store.remove(name)
    with (tmp_path / "secret").open("rb") as file, pytest.raises(InputError, match="none can be uploaded"):
        store.write(known, file)
    store.remove(known)
    store.remove(known)
    assert [path.name for path in folder.iterdir()] == ["other"]


def fetch(url: str, **given: Any) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, **given))


@pytest.fixture
def served(local: Storage, tmp_path: Path) -> Iterator[tuple[str, int, int]]:
    """A dashboard with artifacts: its address, and the ids of the study and of trial 1 in it."""
    tasks = every_kind()["tasks"]
    tasks["hostile"] = single_label([HOSTILE, "b"], worst=[error(HOSTILE, HOSTILE, HOSTILE, "b")])
    evaluate_in_detail(local, 1, document(tasks))
    opened = local.load_study("tiny")
    record = read_study(local, "tiny")
    publish(opened, record, publish_artifacts(local, record, tmp_path))
    with serving(local.url, runs_dir=tmp_path) as port:
        yield f"http://127.0.0.1:{port}", opened._study_id, opened.get_trials()[1]._trial_id


def test_the_dashboard_lists_and_serves_them(served: tuple[str, int, int], local: Storage) -> None:
    address, study_id, trial_id = served
    with fetch(f"{address}/api/studies/{study_id}?after=0") as answer:
        trials = json.load(answer)["trials"]
    artifacts = {one["filename"]: one for one in trials[1]["artifacts"]}
    assert {name: one["artifact_id"] for name, one in artifacts.items()} == listed(local, 1)
    for name, one in artifacts.items():
        with fetch(f"{address}/artifacts/{study_id}/{trial_id}/{one['artifact_id']}") as answer:
            content = answer.read()
            assert answer.headers["Content-Type"] == one["mimetype"]
            assert answer.headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Access-Control-Allow-Origin"] is None
        begins = {"json": b"{", "csv": b"number,", "html": b"<!DOCTYPE html>"}
        assert content.lstrip().startswith(begins[name.rpartition(".")[2]])


def test_nothing_is_uploaded_or_removed(served: tuple[str, int, int], local: Storage, tmp_path: Path) -> None:
    address, study_id, trial_id = served
    before = files(local, tmp_path)
    data = json.dumps({"file": "data:text/html;base64,PGI+", "filename": "a.html"}).encode()
    json_type = {"Content-Type": "application/json"}
    (artifact_id, *_) = before
    for path, given in (
        (f"api/artifacts/{study_id}", {"data": data, "headers": json_type}),
        (f"api/artifacts/{study_id}/{trial_id}/{artifact_id}", {"method": "DELETE"}),
    ):
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            fetch(f"{address}/{path}", **given)
        assert json.load(refused.value)["reason"].startswith("Artifacts are made by hpo")
        refused.value.close()
    assert files(local, tmp_path) == before


def test_a_path_in_disguise_is_served_with_the_policy_too(
    served: tuple[str, int, int], local: Storage
) -> None:
    """The dashboard drops bytes that are no UTF-8 from a path."""
    address, study_id, trial_id = served
    artifact_id = listed(local, 1)["test-evaluation.html"]
    with fetch(f"{address}/artif%FFacts/{study_id}/{trial_id}/{artifact_id}") as answer:
        assert answer.headers["Content-Security-Policy"].startswith("sandbox;")


def test_the_dashboard_deletes_a_study_with_its_artifacts(
    served: tuple[str, int, int], local: Storage, tmp_path: Path
) -> None:
    address, study_id, _ = served
    data = json.dumps({"remove_associated_artifacts": True}).encode()
    with fetch(
        f"{address}/api/studies/{study_id}", data=data, method="DELETE",
        headers={"Content-Type": "application/json"},
    ) as answer:  # fmt: skip
        assert answer.status == 204
    assert files(local, tmp_path) == set()


@pytest.mark.browser
def test_the_dashboard_shows_them_and_a_page_runs_nothing(
    served: tuple[str, int, int], local: Storage
) -> None:
    address, study_id, trial_id = served
    with open_chromium() as chromium:
        page = chromium.new_page(viewport={"width": 1200, "height": 900})
        page.goto(f"{address}/dashboard/studies/{study_id}/trials?numbers=1")
        page.get_by_text("test-evaluation.html").first.wait_for()
        page.goto(f"{address}/dashboard/studies/{study_id}/note")
        page.get_by_role("link", name="All of it").click()
        html_id = listed(local, 1)["test-evaluation.html"]
        page.wait_for_url(f"{address}/artifacts/{study_id}/{trial_id}/{html_id}")
        assert page.locator("h2").inner_text() == "What the best model gets right and wrong"
        assert page.title() == "tiny: Trial 1 on test: 500 rows"
        assert page.evaluate("self.origin") == "null"
        assert HOSTILE in page.inner_text("body")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1200
        page.close()
