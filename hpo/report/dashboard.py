"""optuna-dashboard with our notes and charts in it.

The dashboard has no authentication. So it listens on loopback, unless another address is given, and answers
only requests that name this server as their host: this stops another site whose name points at 127.0.0.1 (DNS
rebinding). It runs in our process, because `optuna-dashboard URL` would show the database's password in the
process list.
"""

from __future__ import annotations

import ipaddress
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from hpo.errors import InputError
from hpo.outcome import Outcome
from hpo.report.caveats import caveats
from hpo.report.charts import all_charts
from hpo.report.detailed import headline
from hpo.report.detailed_page import HEADING
from hpo.report.detailed_tables import detailed_evaluations
from hpo.report.figures import plotly_figure
from hpo.report.formats import (
    format_value,
    objective_values,
    objectives_text,
    precision_facts,
    score_explained,
)
from hpo.report.limits import best_or_nearest, limits_told
from hpo.report.spending import spending_told
from hpo.report.tables import StudyTables, brief_summary
from hpo.report.verdicts import comparison_tables, details, sentences
from hpo.study.store.optuna_internals import study_id_of
from hpo.study.store.storage import Storage, open_storage

if TYPE_CHECKING:
    import optuna
    import pandas as pd

    from hpo.study.reading.study_record import StudyRecord

LOOPBACK = "127.0.0.1"

NOTE_END = "*Above is written by `hpo` and replaced each time; what you write below this line is kept.*"

MAX_HOVER_POINTS = 500
"""The dashboard's charts are rows of 2 KB in the database; beyond this many points they carry no texts."""


def publish(study: optuna.Study, record: StudyRecord) -> None:
    """Put the metric names, our note and our charts into the study, over those published before.

    What a person wrote into the study's note stays, below ours.
    """
    from optuna_dashboard import get_note, save_note, save_plotly_graph_object

    tables = StudyTables(record)
    with warnings.catch_warnings():
        # Optuna has called `set_metric_names` experimental since 3.2.
        warnings.simplefilter("ignore")
        study.set_metric_names(list(record.metric_names))
    before = get_note(study)
    theirs = before.partition(NOTE_END)[2] if NOTE_END in before else before
    save_note(study, f"{study_note(tables)}\n\n---\n{NOTE_END}\n\n{theirs.strip()}".rstrip() + "\n")
    for chart in all_charts(tables):
        figure = plotly_figure(chart)
        if sum(len(series.x) for series in chart.series) > MAX_HOVER_POINTS:
            figure.update_traces(hovertext=None, hoverinfo="x+y")
        save_plotly_graph_object(study, figure, graph_object_id=chart.key)


def study_note(tables: StudyTables) -> str:
    """The best trials, the table by precision and how to read it, in Markdown."""
    record = tables.record
    goals = f"Objective: {objectives_text(record.metric_names, record.directions)}."
    explained = score_explained(record.metric_names, record.definition)
    lines = [f"# {_escape(record.name)}", "", _escape(f"{goals} {explained}".rstrip()), ""]
    if told := sentences(tables):
        lines += ["## Verdict", "", *(f"- **{_escape(sentence)}**" for sentence in told), ""]
        for comparison in record.comparisons.values():
            lines += [*(f"- {_escape(sentence)}" for sentence in details(comparison)), ""]
            for table in comparison_tables(comparison):
                lines += [_markdown_table(table), ""]
    lines += ["## Best", ""]
    for trial in tables.best:
        shown = objective_values(record, trial).items()
        values = ", ".join(f"{_escape(metric)} **{value}**" for metric, value in shown)
        parameters = ", ".join(f"{name} = {format_value(value)}" for name, value in trial.params.items())
        named = "Nearest, trial" if best_or_nearest(trial) == "nearest" else "Trial"
        lines += [f"- {named} {trial.number}: {values}. {_escape(parameters)}."]
        lines += [f"  Precision: {_escape(precision_facts(trial))}"]
    if not tables.best:
        lines += [f"None yet: {len(record.trials)} trials, none complete."]
    lines += [f"- {_escape(told)}" for told in limits_told(record) + spending_told(record)]
    if detailed := detailed_evaluations(tables):
        lines += ["", f"## {HEADING}", "", f"In full: `hpo report {record.name}`.", ""]
        for one in detailed:
            lines += [f"- Trial {one.trial_number} on {_escape(headline(one, record.metric_names))}."]
            lines += [f"  - {_escape(text)}" for text in one.warnings]
    lines += ["", "## By requested precision", "", _markdown_table(brief_summary(tables)), ""]
    lines += [_escape(tables.formats.text()), ""] if tables.formats.shared else []
    lines += ["## How to read this", ""]
    lines += [f"- {notice.text} {notice.advice}" for notice in caveats(tables)]
    infeasible = ", ".join(f"`{outcome}`" for outcome in Outcome if outcome.infeasible)
    lines.append(
        f"- {len(tables.complete)} of {len(record.trials)} trials are complete. Trials that ended as "
        f"{infeasible} are PRUNED here; the user attribute `outcome` says which and `outcome_reason` why."
    )
    lines.append(
        "- This note and the charts with a key by precision or outcome show the study as it was when "
        "`hpo dashboard` was started; the dashboard's own charts are live."
    )
    return "\n".join(lines)


def _markdown_table(table: pd.DataFrame) -> str:
    if table.empty:
        return "There is no trial yet."
    rows = [[_escape(cell) for cell in row] for row in [table.columns, *table.to_numpy()]]
    rows.insert(1, [":---"] * len(table.columns))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _escape(text: str) -> str:
    """Text without meaning in Markdown, but `names`; line breaks would end a table's row."""
    parts = re.split(r"`([^`]+)`", re.sub(r"[\r\n]+", " ", text))
    parts[::2] = [re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = ["`" + name.replace("|", r"\|") + "`" for name in parts[1::2]]
    return "".join(parts)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        """Requests are not news."""


def dashboard_server(storage_url: str, port: int, host: str = LOOPBACK) -> WSGIServer:
    """A server that listens on the IPv4 address `host` and does not yet serve; port 0 takes a free one.

    Raises StorageError when the database cannot be used, InputError when the address cannot be bound.
    """
    from optuna_dashboard import wsgi

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
            return _refuse(start_response, "This server is asked for under a name that is not its own.")
        # A form on another site can send other types of content to this server, but not JSON.
        if environ["REQUEST_METHOD"] != "GET" and (environ.get("CONTENT_LENGTH") or "0") != "0":
            kind = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return _refuse(start_response, "A request must be JSON.", "415 Unsupported Media Type")
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
    """A dashboard that listens."""

    url: str
    warning: str
    """Empty: it listens on loopback alone."""
    serve_forever: Callable[[], None]


@contextmanager
def open_dashboard(storage: Storage, record: StudyRecord, port: int, host: str) -> Iterator[Dashboard]:
    """Put our notes and plots into the study, and have a server listen during the block."""
    study = storage.load_study(record.name)
    publish(study, record)
    with dashboard_server(storage.url, port, host) as server:
        place = f"{LOOPBACK if host == '0.0.0.0' else host}:{server.server_port}"
        reachable = f"whoever reaches {host}:{server.server_port} can delete studies."
        url = f"http://{place}/dashboard/studies/{study_id_of(study)}"
        yield Dashboard(url, "" if host == LOOPBACK else reachable, server.serve_forever)


def _refuse(start_response: Any, reason: str, status: str = "403 Forbidden") -> list[bytes]:
    start_response(status, [("Content-Type", "application/json")])
    return [json.dumps({"reason": reason}).encode()]


def is_own_name(header: str) -> bool:
    """Whether a Host header is `localhost` or an address: no other site can point these at this server."""
    with suppress(ValueError):
        name = urlsplit(f"//{header}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    return False
