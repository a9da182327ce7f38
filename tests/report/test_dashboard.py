from __future__ import annotations

import dataclasses
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import pytest
from optuna_dashboard import get_note, save_note
from support.detailed_documents import every_kind
from support.study_records import DISTRIBUTIONS, fake_record, fake_tables, fake_trial, record_of, tables_of

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


@contextmanager
def serving(url: str) -> Iterator[int]:
    server = dashboard_server(url, 0, LOOPBACK)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_publish_puts_note_charts_and_metric_names_into_the_study(study: optuna.Study) -> None:
    publish(study, fake_record())
    assert study.metric_names == ["score"]
    assert "| fp32 | native |" in get_note(study)
    attributes = study._storage.get_study_system_attrs(study._study_id)
    charts = {key.split(":")[2] for key in attributes if key.startswith("dashboard:plot_data:")}
    assert {"history", "metric_throughput", "learning_curves"} <= charts


def test_publishing_again_replaces_ours_and_keeps_theirs(study: optuna.Study) -> None:
    save_note(study, "Ask Ada about the split.")
    publish(study, record_of([]))
    assert "There is no trial yet." in get_note(study)
    save_note(study, get_note(study) + "Second thought.")
    publish(study, fake_record())
    note = get_note(study)
    assert "There is no trial yet." not in note
    assert note.count(NOTE_END) == 1
    assert note.rstrip().endswith("Ask Ada about the split.\nSecond thought.")


def test_note_names_the_best_and_what_limits_it() -> None:
    note = study_note(fake_tables())
    assert note.startswith("# fake\n\nObjective: maximize score. `score` is the mean")
    assert "- Trial 6: score **0.7672**" in note
    assert "requested fp16, ran fp16 (emulated)" in note
    assert "trained with one seed only" in note
    assert "27 of 40 trials are complete" in note
    assert "None yet: 1 trials, none complete." in study_note(tables_of([fake_trial(0, "fp32", "failed")]))


def test_note_has_the_headline_and_the_warnings_of_detailed_evaluations() -> None:
    trial = dataclasses.replace(fake_trial(6, "fp32"), detailed={"test": every_kind()})
    note = study_note(tables_of([trial])).replace("\u00a0", " ")
    assert (
        "- Trial 6 on test, 500 rows: score 0.712 \\[0.682, 0.742\\] (best constant prediction 0.25)." in note
    )
    assert "In full: `hpo report fake`." in note
    assert "  - tags: The class `rude` is true in 12 rows of test and never predicted." in note
    assert "What the best model" not in study_note(fake_tables())


def test_names_in_the_note_are_text() -> None:
    trial = fake_trial(0, "fp32")
    trial.params["encoder"] = "a|b\n# [c](javascript:1) <img> `<b>|` `"
    note = study_note(tables_of([trial], name="*x*"))
    assert note.startswith("# \\*x\\*\n")
    assert r"encoder = a\|b \# \[c\](javascript:1) \<img\> `<b>\|` \`" in note


@pytest.mark.parametrize(
    ("header", "answered"),
    [
        ("127.0.0.1:8080", True),
        ("localhost:8080", True),
        ("[::1]:8080", True),
        ("10.0.0.5:8080", True),
        ("evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        ("[evil", False),
        ("", False),
    ],
)
def test_only_requests_under_our_own_name_are_answered(header: str, answered: bool) -> None:
    assert is_own_name(header) == answered


@pytest.mark.usefixtures("study")
def test_a_server_answers_to_its_name_alone(sqlite_url: str) -> None:
    with serving(sqlite_url) as port:
        url = f"http://127.0.0.1:{port}/api/studies"
        with urllib.request.urlopen(url) as answer:
            assert b"fake" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(urllib.request.Request(url, headers={"Host": "evil.example"}))
        refused.value.close()


@pytest.mark.usefixtures("study")
def test_a_request_is_refused_unless_it_is_json(sqlite_url: str) -> None:
    with serving(sqlite_url) as port:
        url, body = f"http://127.0.0.1:{port}/api/studies", b'{"study_name": "x", "directions": ["maximize"]}'
        for kind, sent, status in (
            ("text/plain", body, "415"),
            ("application/x-www-form-urlencoded", body, "415"),
        ):
            asked = urllib.request.Request(url, sent, {"Content-Type": kind})
            with pytest.raises(urllib.error.HTTPError, match=status) as refused:
                urllib.request.urlopen(asked)
            refused.value.close()
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json; charset=utf-8"})
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 201


@pytest.mark.usefixtures("study")
def test_a_port_in_use_is_one_clear_message(sqlite_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError,
            match=rf"listen on 127.0.0.1:{port}, but: Address already in use. Choose another --port",
        ):
            dashboard_server(sqlite_url, port)


@pytest.mark.parametrize("host", ["", "localhost", "::1", "10.0.0.256"])
@pytest.mark.usefixtures("study")
def test_another_host_is_an_ipv4_address(sqlite_url: str, host: str) -> None:
    with pytest.raises(InputError, match=f"--host must be an IPv4 address .* but got `{host}`"):
        dashboard_server(sqlite_url, 0, host)
