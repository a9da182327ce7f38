"""The forms in which a model of a real set can be deployed: what each loses, how fast and how large it is.

    python tests/benchmarks/deploying.py nlupp|snips [--folder DIR] [--threads N] [--limit N]

MiniLM with its published weights, trained in fp32 with one good configuration; then `hpo deploy` on the test
split. Run it on a quiet machine: latencies are those of the whole machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from real_sets import REAL_SETS

EPOCHS = {"nlupp": 6, "snips": 3}


def study_file(name: str, folder: Path, limit: int | None) -> Path:
    """Write the study of a set: one trial, of at most `limit` rows a split."""
    study = f"{name}-deploy" if limit is None else f"{name}-deploy-{limit}"
    limits = {} if limit is None else {"limits": dict.fromkeys(("train", "validation", "test"), limit)}
    content: dict[str, Any] = {
        "name": study,
        "n_trials": 1,
        "data": {"source": "jsonl", "path": str(REAL_SETS / name), **limits},
        "model": {"encoder": "minilm"},
        "training": {
            "fp_precision": "fp32",
            "learning_rate": 3.0e-4,
            "batch_size": 32,
            "max_length": 64,
            "attention_dropout": 0.0,
            "epochs": EPOCHS[name],
        },
        "search_space": {},
    }
    path = folder / f"{study}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("set", choices=[*EPOCHS])
    parser.add_argument(
        "--folder", type=Path, help="where the study and its deploy.html are kept (runs/deploying)"
    )
    parser.add_argument("--threads", help="of a prediction")
    parser.add_argument("--limit", type=int, help="rows of each split, to try it")
    asked = parser.parse_args()
    folder = asked.folder or Path("runs", "deploying")
    folder.mkdir(parents=True, exist_ok=True)
    path = study_file(asked.set, folder, asked.limit)
    hpo = [sys.executable, "-m", "hpo"]
    subprocess.run([*hpo, "run", path.name], cwd=folder, check=True)
    threads = ["--threads", asked.threads] if asked.threads else []
    subprocess.run([*hpo, "deploy", path.name, *threads], cwd=folder, check=True)


if __name__ == "__main__":
    main()
