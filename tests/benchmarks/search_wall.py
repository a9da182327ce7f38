"""Seconds until a search has trained a checkpoint as good as an exhaustive search's, ours against the peers.

    python tests/benchmarks/search_wall.py     every contender on every set, with each seed

The target is the best validation score of an exhaustive search, minus half a point. A search is a process of
its own. Its clock begins when the process is started and ends at its first evaluation that scores at least
the target, of whichever trial; then it is killed. Ours is `hpo run STUDY` with the defaults of a study, so
with 20 trials; `hpo-hours` has `--hours` of the cap instead, and `hpo-no-portfolio` has `portfolio: false`.
The peers are in `wall_searches.py`, the space and the targets in `wall.py`. Contenders take turns, so what
the machine does meets all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from peers import missing
from real_sets import REAL_SETS
from wall import WALLS, WIDER, Wall
from wall_searches import PEERS, SCORES

HOURS = "hpo-hours"
OURS: dict[str, dict[str, Any]] = {"hpo": {}, HOURS: {}, "hpo-no-portfolio": {"portfolio": False}}
"""What each has in its study file that a study with the defaults has not."""
CONTENDERS = (*OURS, *PEERS)
WANTED = 0.25
"""Of the best peer's time."""
POLL_SECONDS = 0.1
DATABASE = "hpo.db"


@dataclass(frozen=True)
class Search:
    """One search, from the start of its process to its end."""

    set: str
    contender: str
    seed: int
    target: float
    cap: float
    """Seconds after which it is ended."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    search: Search
    seconds: float
    """Until the target was reached, or the search ended without."""
    reached: bool
    course: tuple[tuple[float, float], ...]
    """Seconds and score of each evaluation that was the best so far."""

    def seconds_to(self, score: float) -> float | None:
        """Until the first evaluation with at least this score; None: there was none."""
        return next((seconds for seconds, found in self.course if found >= score), None)


def command(search: Search, rows: Path, work: Path) -> list[str]:
    """What starts the search in the folder `work`."""
    if search.contender in PEERS:
        program = Path(__file__).with_name("wall_searches.py")
        return [sys.executable, str(program), search.contender, str(rows), str(search.seed)]
    content = Wall.read(rows / "wall.json").study(rows, search.seed, **OURS[search.contender])
    (work / "study.yaml").write_text(yaml.safe_dump(content))
    budget = ["--hours", str(search.cap / 3600)] if search.contender == HOURS else []
    return [sys.executable, "-m", "hpo", "run", "study.yaml", "--storage", f"sqlite:///{DATABASE}", *budget]


def scores(work: Path) -> list[float]:
    """Of all evaluations so far."""
    if (noted := work / SCORES).exists():
        return [float(line) for line in noted.read_text().splitlines(keepends=True) if line.endswith("\n")]
    database = work / DATABASE
    if not database.exists():
        return []
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60)) as connection:
        named = "SELECT count(*) FROM sqlite_master WHERE name = 'hpo_evaluations'"
        if not connection.execute(named).fetchone()[0]:
            return []
        found = connection.execute("SELECT metrics FROM hpo_evaluations").fetchall()
    return [json.loads(metrics)["score"] for (metrics,) in found]


def run(search: Search, rows: Path) -> Found:
    """Search until the target is reached, the search ends, or its time is over.

    Raises RuntimeError with what it said where the search failed.
    """
    course: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        work, log = Path(folder), Path(folder, "log")
        words = command(search, rows, work)
        with log.open("w") as out:
            started = time.monotonic()
            process = subprocess.Popen(words, cwd=work, stdout=out, stderr=out, start_new_session=True)
        try:
            while True:
                has_ended = process.poll() is not None
                best = max(scores(work), default=0.0)
                seconds = time.monotonic() - started
                if best > (course[-1][1] if course else 0.0):
                    course.append((round(seconds, 2), best))
                if best >= search.target or has_ended or seconds > search.cap:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reached = best >= search.target
        if has_ended and process.returncode and not reached:
            said = log.read_text()[-3000:]
            raise RuntimeError(f"{search.contender} ended with {process.returncode}:\n{said}")
    return Found(search, round(seconds, 2), reached, tuple(course))


def measured(searches: Iterable[Search], results: Path | None = None) -> Iterator[Found]:
    """What each search comes to: as the file `results` has it, or run and then appended to it."""
    known = {}
    lines = results.read_text().splitlines() if results and results.exists() else []
    for line in map(json.loads, lines):
        search = Search(**line.pop("search"))
        known[search] = Found(search, line["seconds"], line["reached"], tuple(map(tuple, line["course"])))
    for search in searches:
        if search not in known:
            with tempfile.TemporaryDirectory() as folder:
                rows = Path(folder)
                WALLS[search.set].write(rows)
                known[search] = run(search, rows)
            if results:
                results.parent.mkdir(parents=True, exist_ok=True)
                with results.open("a") as out:
                    out.write(f"{json.dumps(asdict(known[search]))}\n")
        yield known[search]


def table(found: Sequence[Found], contenders: Sequence[str], target: float) -> Iterator[str]:
    """Of one set: Markdown, then the ratios. A search that did not reach `target` counts as its cap."""
    medians = {}
    for contender in contenders:
        each = [one for one in found if one.search.contender == contender]
        times = [one.seconds_to(target) for one in each]
        seconds = [one.search.cap if after is None else after for one, after in zip(each, times, strict=True)]
        medians[contender] = statistics.median(seconds)
        median, low, high = (
            f"{value:.1f}" if value < each[0].search.cap else f"> {value:.0f}"
            for value in (medians[contender], min(seconds), max(seconds))
        )
        reached = f"{sum(after is not None for after in times)} of {len(each)}"
        yield f"| {contender} | {median} ({low} to {high}) | {reached} |"
    peers = [contender for contender in contenders if contender in PEERS]
    for contender in (one for one in contenders if one in OURS and peers):
        best = min(peers, key=medians.__getitem__)
        ratio = medians[contender] / medians[best]
        verdict = "reached" if ratio <= WANTED else "NOT reached"
        yield f"{contender} takes {ratio:.2f} of the time of {best}; wanted at most {WANTED:g}: {verdict}"


def measure(arguments: argparse.Namespace) -> None:
    from hpo.device import probe_device

    contenders = []
    for name in arguments.contenders:
        if package := missing(name):
            print(f"{name}: left out, {package} is not installed (`make bench` installs the peers)")
        else:
            contenders.append(name)
    searches = [
        Search(name, contender, seed, WALLS[name].target(), arguments.cap)
        for seed in range(arguments.seeds)
        for name in arguments.sets
        for contender in contenders
    ]
    found = []
    for one in measured(searches, arguments.results):
        best = one.course[-1][1] if one.course else 0.0
        print(f"{one.search}: {one.seconds} s, {best:.4f}", file=sys.stderr, flush=True)
        found.append(one)
    device = probe_device("cpu")
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {device.describe()}, torch {device.torch_version}, "
        f"{arguments.seeds} seeds, at most {arguments.cap:g} s"
    )
    for name in arguments.sets:
        of_set = [one for one in found if one.search.set == name]
        for target in (WALLS[name].target(), WALLS[name].target(WIDER)):
            print(f"\n{name}, {target:.4f}:\n\n| | seconds, median (min to max) | reached |")
            print("| --- | --- | --- |")
            print("\n".join(table(of_set, contenders, target)))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", nargs="+", choices=WALLS, default=list(WALLS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--cap", type=float, default=300.0, help="seconds of one search")
    parser.add_argument("--results", type=Path, help="a file of searches, with which a stopped run goes on")
    arguments = parser.parse_args(words)
    for name in arguments.sets:
        if not (REAL_SETS / name / "tasks.json").exists():
            parser.error(f"there is no set {name} in {REAL_SETS}: HPO_DATA_DIR names their folder")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    measure(arguments)


if __name__ == "__main__":
    main()
