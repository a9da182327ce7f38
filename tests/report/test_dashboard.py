import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import optuna
import pytest
from optuna_dashboard import get_note, save_note
from support.study_records import DISTRIBUTIONS, fake_record, fake_trial, record_of, tables_of

from hpo.errors import InputError
from hpo.report.dashboard import LOOPBACK, NOTE_END, dashboard_server, is_own_name, publish, study_note
from hpo.study.store.storage import open_storage


@pytest.fixture
def study(sqlite_url: str) -> Iterator[optuna.Study]:
    storage = open_storage(sqlite_url)
    study = optuna.create_study(study_name="fake", storage=storage.optuna, direction="maximize")
    for trial in fake_record().trials[:3]:
        distributions = {name: DISTRIBUTIONS[name] for name in trial.params}
        given = {"params": trial.params, "distributions": distributions, "values": trial.values}
        study.add_trial(optuna.trial.create_trial(**given))
    yield study
    storage.close()


@pytest.fixture
def api(study: optuna.Study, sqlite_url: str) -> Iterator[str]:
    """Address of the API of a dashboard with the study."""
    assert study.study_name == "fake"
    server = dashboard_server(sqlite_url, 0, LOOPBACK)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/api/studies"
    server.shutdown()
    thread.join()
    server.server_close()


def status_of(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code


def test_study_gets_note_charts_and_metric_names(study: optuna.Study) -> None:
    publish(study, fake_record())
    assert study.metric_names == ["score"]
    assert "| fp32 | native |" in get_note(study)
    attributes = study._storage.get_study_system_attrs(study._study_id)
    charts = {key.split(":")[2] for key in attributes if key.startswith("dashboard:plot_data:")}
    assert {"history", "metric_throughput", "learning_curves"} <= charts


def test_a_users_text_in_the_note_is_kept(study: optuna.Study) -> None:
    save_note(study, "Ask Ada about the split.")
    publish(study, record_of([]))
    assert "0 trials, none complete." in get_note(study)
    save_note(study, get_note(study) + "Second thought.")
    publish(study, fake_record())
    note = get_note(study)
    assert "0 trials, none complete." not in note
    assert note.count(NOTE_END) == 1
    assert note.rstrip().endswith("Ask Ada about the split.\nSecond thought.")


def test_names_in_the_note_are_escaped() -> None:
    trial = fake_trial(0, "fp32")
    trial.params["encoder"] = "a|b\n# [c](javascript:1) <img> `<b>|` `"
    note = study_note(tables_of([trial], name="*x*"))
    assert note.startswith("# \\*x\\*\n")
    assert r"encoder=a\|b \# \[c\](javascript:1) \<img\> `<b>\|` \`" in note


@pytest.mark.parametrize(
    ("header", "is_own"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_own_names_of_the_server(header: str, is_own: bool) -> None:
    assert is_own_name(header) == is_own


def test_requests_under_another_name_are_refused(api: str) -> None:
    assert status_of(urllib.request.Request(api)) == 200
    assert status_of(urllib.request.Request(api, headers={"Host": "evil.example"})) == 403


def test_requests_with_another_content_than_json_are_refused(api: str) -> None:
    body = b'{"study_name": "x", "directions": ["maximize"]}'
    kinds = {
        "text/plain": 415,
        "application/x-www-form-urlencoded": 415,
        "application/json; charset=utf-8": 201,
    }
    for kind, status in kinds.items():
        assert status_of(urllib.request.Request(api, body, {"Content-Type": kind})) == status


@pytest.mark.parametrize("host", ["", "localhost", "::1", "10.0.0.256"])
@pytest.mark.usefixtures("study")
def test_a_host_must_be_an_ipv4_address(sqlite_url: str, host: str) -> None:
    with pytest.raises(InputError, match=f"--host must be an IPv4 address .* but got `{host}`"):
        dashboard_server(sqlite_url, 0, host)
