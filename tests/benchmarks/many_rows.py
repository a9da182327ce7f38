"""Time and memory of reading and checking a csv file of a million short rows, as `hpo check` does.

    python tests/benchmarks/many_rows.py [--rows 1000000] [--folder FOLDER]

Writes the file (German Excel's form: cp1252, `;`, CRLF), then runs each step in a process of its own, so that
its peak is its own:

    read    `hpo.data.dataset.load_data`
    facts   that, and `hpo.data.checks.data_facts`
    check   `hpo check`, the tokens not cached: reading, facts, tokenising, page

CPU seconds are of the process with its imports; the peak is its largest resident set (`ru_maxrss`), in which
files that are mapped count too. Needs Linux.

On a shared machine with 2 cores, a million rows of 108 MiB: read 28 CPU s and 816 MiB, facts 38 CPU s and
865 MiB, check 73 CPU s and 1608 MiB, of which the tokens, mapped from the cache, are about 250 MiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
from pathlib import Path

SENTENCE = (
    "late again parcel rude driver refund schön broken box thanks for nothing große Enttäuschung very fast "
    "perfect app crashes price too high support never answers geöffnet Gerät kaputt"
)
TAGS = ("late", "price", "broken", "rude", "app")
STEPS = ("read", "facts", "check")


def write_study(folder: Path, num_rows: int) -> Path:
    """A study of a multi-label, a single-label and a regression task; one row in ten repeats a text."""
    draw = random.Random(7)
    words = SENTENCE.split()
    texts: list[str] = []
    for split, num in (("train", num_rows), ("validation", max(num_rows // 50, 1))):
        with (folder / f"{split}.csv").open("w", encoding="cp1252", newline="") as file:
            file.write("text;tone;tags;grade\r\n")
            for number in range(num):
                repeats = texts and draw.random() < 0.1
                text = (
                    draw.choice(texts)
                    if repeats
                    else f"{number} " + " ".join(draw.choices(words, k=draw.randint(4, 24)))
                )
                if number % 100 == 0:
                    texts.append(text)
                tags = "|".join(tag for tag in TAGS if draw.random() < 0.2)
                tone = "calm" if draw.random() < 0.7 else "angry"
                file.write(f"{text};{tone};{tags};{draw.randint(1, 50) / 10:g}\r\n".replace(".", ","))
    study = {
        "name": "rows",
        "data": {
            "source": "csv",
            "path": str(folder),
            "tasks": {
                "tone": {"kind": "single_label"},
                "tags": {"kind": "multi_label"},
                "grade": {"kind": "regression"},
            },
            "columns": {"labels": {"tone": "tone", "tags": "tags", "grade": "grade"}},
        },
    }
    path = folder / "rows.yaml"
    path.write_text(json.dumps(study))  # which is YAML
    return path


def run_step(step: str, study: Path) -> None:
    """One step, in a process of its own."""
    os.chdir(study.parent)
    from hpo.config.study_config import load_study

    config = load_study(study)
    if step == "check":
        from hpo.report.data_check import check_data
        from hpo.report.data_page import write_data_page

        write_data_page(check_data(config, Path("runs")), Path("data.html"))
        return
    from hpo.data.checks import data_facts
    from hpo.data.dataset import load_data

    dataset = load_data(config.data)
    if step == "facts":
        data_facts(dataset)


def measure(step: str, study: Path) -> dict[str, float]:
    """CPU seconds, seconds and peak bytes of a step."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    process = context.Process(target=_measured, args=(step, study, found))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the step {step} ended with {process.exitcode}")
    return dict(found.get())


def _measured(step: str, study: Path, found: multiprocessing.SimpleQueue[dict[str, float]]) -> None:
    started = time.perf_counter()
    run_step(step, study)
    seconds = time.perf_counter() - started
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found.put(
        {
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "seconds": round(seconds, 1),
            "peak_bytes": usage.ru_maxrss * 1024,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Reading and checking many rows")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="kept; else a temporary one")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="rows-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        study = folder / "rows.yaml"
        if not study.exists():
            study = write_study(folder, given.rows)
        size = (folder / "train.csv").stat().st_size
        print(f"{given.rows:,} rows, {size / 2**20:.0f} MiB")
        for step in given.steps:
            found = measure(step, study.resolve())
            print(
                f"{step:<6} {found['cpu_seconds']:>7.1f} CPU s {found['seconds']:>7.1f} s "
                f"{found['peak_bytes'] / 2**20:>7.0f} MiB",
                flush=True,
            )
    finally:
        if given.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
