"""One contender, in a process of its own: trains a workload once and prints what it measured as JSON.

    python tests/benchmarks/contenders.py NAME FOLDER WORKLOAD PRECISION

Each trains the same MiniLM with a linear layer for each task on the same rows, with the same batch size,
dropout, learning rate and precision, AdamW, for one epoch, then evaluates the validation split as it does by
default (Trainer in unsorted batches of 8, ours in sorted ones). Rates leave out the first steps, as many for
each.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

from workload import WORKLOADS


def main() -> None:
    name, folder, workload, precision = sys.argv[1:]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    contenders = import_module("ours" if name.startswith("hpo") else "peers").CONTENDERS
    print(json.dumps(contenders[name](Path(folder), WORKLOADS[workload], precision)))


if __name__ == "__main__":
    main()
