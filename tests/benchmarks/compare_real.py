"""What each precision does on a real set: a small search, then `hpo compare` on new seeds.

    python tests/benchmarks/compare_real.py nlupp|snips [--folder DIR]

MiniLM with its published weights; the search has three learning rates in fp32 and bf16. The comparison takes
the best configuration under each precision that is native here, with at most twelve seeds, on the test split:
of 455 rows (nlupp) and 700 (snips), which is too few for the usual margin of half a point.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from real_sets import REAL_SETS

SETS: dict[str, dict[str, Any]] = {
    "nlupp": {"training": {"epochs": 2}, "data": {"limits": {"train": 1000}}},
    "snips": {"training": {"epochs": 1}, "data": {"limits": {"train": 1000}}},
}


def study_file(name: str, folder: Path) -> Path:
    """Write the study of a set."""
    chosen = SETS[name]
    content = {
        "name": name,
        "data": {"source": "jsonl", "path": str(REAL_SETS / name), **chosen.get("data", {})},
        "model": {"encoder": "minilm"},
        "training": {"batch_size": 32, "max_length": 64, "attention_dropout": 0.0, **chosen["training"]},
        "sampler": {"name": "grid"},
        "pruner": {"name": "none"},
        "n_trials": 6,
        "search_space": {
            "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
            "learning_rate": {"type": "categorical", "choices": [1.0e-4, 3.0e-4, 1.0e-3]},
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("set", choices=[*SETS])
    parser.add_argument("--folder", type=Path, help="where the study is kept, to go on with it")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = study_file(asked.set, folder)
        hpo = [sys.executable, "-m", "hpo"]
        subprocess.run([*hpo, "run", path.name], cwd=folder, check=True)
        compare = [*hpo, "compare", path.name, "--top", "1", "--margin", "2"]
        subprocess.run([*compare, "--price"], cwd=folder, check=True)
        subprocess.run(compare, cwd=folder, check=True)


if __name__ == "__main__":
    main()
