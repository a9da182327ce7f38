"""A check of a study's data before training: facts, lengths, advice, and their tables as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.config.study_config import StudyConfig
from hpo.config.trial_config import build_trial_config
from hpo.data.advice import data_advice, study_lengths
from hpo.data.checks import DataFacts, LengthFacts, TaskFacts, data_facts, length_facts
from hpo.data.dataset import load_data
from hpo.models.encoder import load_tokenizer
from hpo.report.formats import format_number
from hpo.tasks.tokenized_split import Windowing
from hpo.trial.objectives import check_metrics

if TYPE_CHECKING:
    from hpo.report.terminal import Part

QUANTILES = (50, 90, 99, 100)
MAX_CLASSES = 12
"""A terminal shows the classes of a task with at most so many; `--json` has them all."""


@dataclass(frozen=True)
class DataCheck:
    """What `check_data` finds."""

    study: str
    encoder: str
    """The encoder whose tokenizer counted; the first of those that are searched."""
    long_text: str
    facts: DataFacts
    lengths: LengthFacts
    advice: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> Iterator[Part]:
        """Tables of the splits, tasks, classes and lengths; then what to change."""
        tables = {
            f"{self.study}: splits": rows_table(self),
            "rows of each source": sources_table(self),
            "texts in two splits": leaks_table(self),
            "labels": tasks_table(self),
            **{
                task.name: balance_table(task) for task in self.facts.tasks if len(task.labels) <= MAX_CLASSES
            },
            f"length in tokens of {self.encoder}, long_text {self.long_text}": cuts_table(self),
        }
        for title, table in tables.items():
            yield title, table.rename(columns=lambda name: name.replace("`", ""))
        yield from ("- " + one.replace("`", "") for one in self.advice)
        if not self.advice:
            yield "Nothing was found that speaks against training on these data."


def check_data(config: StudyConfig, runs_dir: Path) -> DataCheck:
    """Read, check and tokenise the data of a study. Raises InputError as a run of it would."""
    dataset = load_data(config.data)
    check_metrics(config, dataset)
    facts = data_facts(dataset)
    choices = getattr(config.search_space.get("encoder"), "choices", ())
    encoder = build_trial_config(config, {"encoder": choices[0]} if choices else {}, "fp32").encoder
    tokenizer = load_tokenizer(
        encoder, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
    )
    lengths = length_facts(dataset, tokenizer, _windowings(config), runs_dir / "cache" / "tokens")
    name = encoder if isinstance(encoder, str) else str(encoder.get("tokenizer", "minilm"))
    advice = data_advice(facts, lengths, config)
    return DataCheck(config.name, name, config.data.long_text, facts, lengths, advice)


def _windowings(config: StudyConfig) -> list[Windowing]:
    data = config.data
    return [
        Windowing(length, data.long_text, data.stride_of(length), data.pair_segments)
        for length in study_lengths(config)
    ]


def rows_table(check: DataCheck) -> pd.DataFrame:
    """A row for each split: rows, repeated texts, lengths in tokens."""
    lengths = check.lengths
    return pd.DataFrame(
        {
            "split": name,
            "rows": f"{split.num_rows:,}",
            "repeated texts": f"{split.num_duplicates:,}",
            "tokens": f"{lengths.num_tokens[name]:,}",
        }
        | {_quantile(q): f"{lengths.quantiles[name][q]:,}" for q in QUANTILES}
        for name, split in check.facts.splits.items()
    )


def sources_table(check: DataCheck) -> pd.DataFrame:
    """A row for each source of the data: its rows in each split, and its share of those for training."""
    sources, total = check.facts.sources, check.facts.splits["train"].num_rows
    return pd.DataFrame(
        {"source": name}
        | {split: f"{of.get(name, 0):,}" for split, of in sources.items()}
        | {"share of train": _percent(num, total)}
        for name, num in sources.get("train", {}).items()
    )


def _quantile(percent: int) -> str:
    return {50: "median length", 100: "longest"}.get(percent, f"{percent} %-quantile")


def tasks_table(check: DataCheck) -> pd.DataFrame:
    """A row for each task and split: how much of it is labelled, and in how many rows no class holds."""
    rows = []
    for task in check.facts.tasks:
        for split, num in task.num_annotated.items():
            total = task.num_rows[split]
            rows.append(
                {
                    "task": task.name,
                    "split": split,
                    "labelled": f"{num:,}",
                    "unlabelled": _percent(total - num, total),
                    "none holds": _percent(task.num_empty[split], num) if split in task.num_empty else "",
                }
            )
    return pd.DataFrame(rows)


def leaks_table(check: DataCheck) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "texts of": leak.split,
            "that stand in": leak.other,
            "rows": f"{leak.num_rows:,}",
            "share": _percent(leak.num_rows, check.facts.splits[leak.split].num_rows),
        }
        for leak in check.facts.leaks
    )


def balance_table(task: TaskFacts) -> pd.DataFrame:
    """A row for each class (rows and share) or span name (spans), the most frequent in training first."""
    if task.numbers:
        return pd.DataFrame(
            {"split": split} | {key: format_number(value) for key, value in numbers.items()}
            for split, numbers in task.numbers.items()
        )
    if not task.labels:
        return pd.DataFrame()
    return pd.DataFrame(
        {"span name" if task.counts_spans else "class": label}
        | {
            split: f"{of[label]:,}"
            + ("" if task.counts_spans else f" ({_percent(of[label], task.num_annotated[split])})")
            for split, of in task.counts.items()
        }
        for label in sorted(task.labels, key=lambda label: -task.counts["train"][label])
    )


def cuts_table(check: DataCheck) -> pd.DataFrame:
    """A row for each `max_length`: texts over it, windows, and lost spans by task."""
    lengths = check.lengths
    num_texts = sum(split.num_rows for split in check.facts.splits.values())
    rows = []
    for cut in lengths.cuts:
        row = {
            "max_length": str(cut.max_length),
            "texts over it": _of(sum(cut.num_over.values()), num_texts),
        }
        if check.long_text == "window":
            row["windows"] = f"{sum(cut.num_windows.values()):,}"
        for task, lost in cut.num_lost_spans.items():
            row[f"lost spans of `{task}`"] = _of(sum(lost.values()), sum(lengths.num_spans[task].values()))
        rows.append(row)
    return pd.DataFrame(rows)


def _of(num: int, total: int) -> str:
    return f"{num:,} ({_percent(num, total)})" if num else "0"


def _percent(num: int, total: int) -> str:
    """No more than is there: 0 % and 100 % are so exactly."""
    share = 100 * num / total if total else 0.0
    if share in (0, 100):
        return f"{share:.0f} %"
    return "< 0.1 %" if share < 0.1 else f"{min(share, 99.9):.1f} %"
