"""optuna-dashboard with our notes and charts.

The dashboard has no authentication. So it listens on loopback, unless another address is given, and answers
only requests with its own address as host, since another site may have a name for 127.0.0.1. It runs
in our process, because `optuna-dashboard URL` would show the database's password in the process list.
"""

import ipaddress
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna
from optuna_dashboard import get_note, save_note, save_plotly_graph_object, wsgi

from hpo.errors import InputError
from hpo.outcome import Outcome
from hpo.report.caveats import caveats
from hpo.report.charts import all_charts
from hpo.report.detailed import evaluations_of
from hpo.report.screens import best
from hpo.report.status import objectives_text
from hpo.report.tables import StudyTables, precision_table
from hpo.report.terminal import Part, Rows
from hpo.report.trial_precision import shared_formats
from hpo.report.verdicts import comparison_tables, details, recommendations
from hpo.study.reading.study_record import StudyRecord
from hpo.study.store.optuna_internals import study_id_of
from hpo.study.store.storage import Storage, open_storage

LOOPBACK = "127.0.0.1"
NOTE_END = "*The text above is from `hpo`, which replaces it each time. The text below this line is kept.*"
MAX_HOVER_POINTS = 500
"""Most points of a chart with texts: the dashboard stores charts in rows of 2 KB in the database."""


def publish(study: optuna.Study, record: StudyRecord) -> None:
    """Put the metric names, our note and our charts into the study. A user's text in the note stays below
    ours.
    """
    tables = StudyTables(record)
    with warnings.catch_warnings():
        # Optuna has called `set_metric_names` experimental since 3.2.
        warnings.simplefilter("ignore")
        study.set_metric_names(list(record.metric_names))
    before = get_note(study)
    kept = before.partition(NOTE_END)[2] if NOTE_END in before else before
    save_note(study, f"{study_note(tables)}\n\n---\n{NOTE_END}\n\n{kept.strip()}".rstrip() + "\n")
    for chart in all_charts(tables):
        figure = chart.with_title()
        if sum(len(trace.x) for trace in figure.data) > MAX_HOVER_POINTS:
            figure.update_traces(hovertext=None, hoverinfo="x+y")
        save_plotly_graph_object(study, figure, graph_object_id=chart.key)


def study_note(tables: StudyTables) -> str:
    record = tables.record
    goals = objectives_text(record.metric_names, record.directions)
    lines = [f"# {_escape(record.name)}", f"Objective: {_escape(goals)}."]
    if messages := recommendations(record):
        lines += ["## Verdict", *(f"- **{_escape(message)}**" for message in messages)]
    for comparison in record.comparisons.values():
        lines += _markdown(details(comparison))
        lines += map(_markdown_table, comparison_tables(comparison))
    lines += ["## Best", *_markdown(best(record))]
    for trial in tables.best:
        warned = [text for one in evaluations_of(trial) for text in one.warnings]
        lines += [*_markdown(warned), f"In full: `hpo report {record.name}`."] if trial.detailed else []
    if rows := precision_table(tables):  # none: all trials wait or are invalid
        lines += ["## By requested precision", _markdown_table(rows)]
        lines += filter(None, [_escape(shared_formats(record.trials, record.definition))])
    infeasible = ", ".join(f"`{outcome}`" for outcome in Outcome if outcome.infeasible)
    notices = [f"{notice.text} {notice.advice}" for notice in caveats(tables)]
    notices.append(
        f"Trials that ended as {infeasible} are PRUNED here; the user attributes `outcome` and "
        "`outcome_reason` tell more."
    )
    notices.append("This note and our charts are as old as `hpo dashboard`; the other charts are live.")
    lines += ["## How to read this", *_markdown(notices)]
    return "\n\n".join(lines)


def _markdown(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, tuple):
            yield _markdown_table(part[1])
        else:
            indent = "  " if str(part).startswith(" ") else ""
            yield f"{indent}- {_escape(str(part).strip())}"


def _markdown_table(rows: Rows) -> str:
    columns = list(rows[0])
    lines = [columns, [":---"] * len(columns), *(row.values() for row in rows)]
    escaped = ([cell if cell == ":---" else _escape(cell) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def _escape(text: str) -> str:
    """Return a text without meaning in Markdown, except `names`; line breaks would end a table's row."""
    parts = re.split(r"`([^`]+)`", re.sub(r"[\r\n]+", " ", text))
    parts[::2] = [re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = ["`" + name.replace("|", r"\|") + "`" for name in parts[1::2]]
    return "".join(parts)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        """Log no request."""


def dashboard_server(storage_url: str, port: int, host: str = LOOPBACK) -> WSGIServer:
    """Return a listening server on the IPv4 address `host`. Raises StorageError or InputError."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise InputError(
            f"--host must be an IPv4 address of this machine, or 0.0.0.0 for all of them, but got `{host}`."
        ) from None
    storage = open_storage(storage_url, create=False)
    app = wsgi(storage.optuna)

    def guarded(environ: dict[str, Any], start_response: Any) -> Any:
        if not is_own_name(environ.get("HTTP_HOST", "")):
            return _refuse(
                start_response, "403 Forbidden", "The Host header must be an address of this server."
            )
        # A form on another site can send other types of content to this server, but not JSON.
        kind = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
        has_body = environ["REQUEST_METHOD"] != "GET" and (environ.get("CONTENT_LENGTH") or "0") != "0"
        if has_body and kind != "application/json":
            return _refuse(start_response, "415 Unsupported Media Type", "A request must be JSON.")
        return app(environ, start_response)

    try:
        return make_server(host, port, guarded, server_class=_Server, handler_class=_Handler)
    except OSError as error:
        storage.close()
        raise InputError(
            f"the dashboard must be able to listen on {host}:{port}, but: {error.strerror}. "
            "Choose another --port or --host."
        ) from error


@dataclass(frozen=True)
class Dashboard:
    url: str
    warning: str  # empty: it listens on loopback alone
    serve_forever: Callable[[], None]


@contextmanager
def open_dashboard(storage: Storage, record: StudyRecord, port: int, host: str) -> Iterator[Dashboard]:
    """Put our notes and plots into the study, and listen during the block."""
    study = storage.load_study(record.name)
    publish(study, record)
    with dashboard_server(storage.url, port, host) as server:
        address = f"{LOOPBACK if host == '0.0.0.0' else host}:{server.server_port}"
        exposed = f"whoever reaches {host}:{server.server_port} can delete studies."
        url = f"http://{address}/dashboard/studies/{study_id_of(study)}"
        yield Dashboard(url, "" if host == LOOPBACK else exposed, server.serve_forever)


def _refuse(start_response: Any, status: str, reason: str) -> list[bytes]:
    start_response(status, [("Content-Type", "application/json")])
    return [json.dumps({"reason": reason}).encode()]


def is_own_name(header: str) -> bool:
    """Return whether a Host header is `localhost` or an address: no other site can point these here."""
    with suppress(ValueError):
        name = urlsplit(f"//{header}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    return False
