"""A check of a study's data before training: facts, lengths and advice."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpo.config.study_config import StudyConfig
from hpo.config.trial_config import build_trial_config
from hpo.data.checks import (
    DataFacts,
    LengthFacts,
    TaskFacts,
    data_advice,
    data_facts,
    length_facts,
    study_lengths,
)
from hpo.data.dataset import load_data
from hpo.models.encoder import load_tokenizer
from hpo.report.formats import format_number, format_percent
from hpo.report.terminal import Part, Rows, Shown
from hpo.tasks.tokenized_split import Windowing
from hpo.trial.objectives import check_metric_values, check_names

_QUANTILES = {50: "median length", 90: "90% quantile", 99: "99% quantile", 100: "longest"}
MAX_CLASSES = 12  # tasks with more classes have no table of classes; `--json` has them all


@dataclass(frozen=True)
class DataCheck(Shown):
    study: str
    encoder: str  # encoder of the tokenizer; the first of the searched ones
    long_text: str
    facts: DataFacts
    lengths: LengthFacts
    advice: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> Iterator[Part]:
        """Show tables of the splits, tasks, classes and lengths, then the advice."""
        yield f"{self.study}: splits", self._splits()
        yield from self.facts.evidence()
        yield "rows of each source", self._sources()
        yield "texts in two splits", self._leaks()
        yield "labels", self._tasks()
        for task in self.facts.tasks:
            yield f"Metrics of {task.name}: {', '.join(task.metrics).replace(',', ' (primary),', 1)}."
        yield from (
            (task.name, class_table(task)) for task in self.facts.tasks if len(task.labels) <= MAX_CLASSES
        )
        yield f"length in tokens of {self.encoder}, long_text {self.long_text}", self._lengths()
        yield from ("- " + one.replace("`", "") for one in self.advice)
        if not self.advice:
            yield "No problem was found in these data."

    def _splits(self) -> Rows:
        lengths = self.lengths
        return [
            {
                "split": name,
                "rows": f"{split.num_rows:,}",
                "repeated texts": f"{split.num_duplicates:,}",
                "tokens": f"{lengths.num_tokens[name]:,}",
                **{title: f"{lengths.quantiles[name][q]:,}" for q, title in _QUANTILES.items()},
            }
            for name, split in self.facts.splits.items()
        ]

    def _sources(self) -> Rows:
        sources, total = self.facts.sources, self.facts.splits["train"].num_rows
        return [
            {
                "source": name,
                **{split: f"{rows.get(name, 0):,}" for split, rows in sources.items()},
                "share of train": _share(num, total),
            }
            for name, num in sources.get("train", {}).items()
        ]

    def _leaks(self) -> Rows:
        return [
            {
                "split": leak.split,
                "also in": leak.other,
                "rows": f"{leak.num_rows:,}",
                "share": _share(leak.num_rows, self.facts.splits[leak.split].num_rows),
            }
            for leak in self.facts.leaks
        ]

    def _tasks(self) -> Rows:
        return [
            {
                "task": task.name,
                "split": split,
                "labelled": f"{num:,}",
                "unlabelled": _share(task.num_rows[split] - num, task.num_rows[split]),
                "no label": _share(task.num_empty[split], num) if split in task.num_empty else "",
            }
            for task in self.facts.tasks
            for split, num in task.num_annotated.items()
        ]

    def _lengths(self) -> Rows:
        lengths, rows = self.lengths, []
        num_texts = sum(split.num_rows for split in self.facts.splits.values())
        for cut in lengths.cuts:
            num_over = sum(cut.num_over.values())
            row = {"max_length": str(cut.max_length), "longer texts": _count(num_over, num_texts)}
            if self.long_text == "window":
                row["windows"] = f"{sum(cut.num_windows.values()):,}"
            for task, lost in cut.num_lost_spans.items():
                row[f"lost spans of {task}"] = _count(
                    sum(lost.values()), sum(lengths.num_spans[task].values())
                )
            rows.append(row)
        return rows


def check_data(config: StudyConfig, runs_dir: Path) -> DataCheck:
    """Read, check and tokenise the data of a study. Raises InputError like a run of it."""
    dataset = load_data(config.data)
    check_names(config, dataset.tasks, dataset.splits)
    check_metric_values(config, dataset)
    facts = data_facts(dataset)
    choices = getattr(config.search_space.get("encoder"), "choices", ())
    encoder = build_trial_config(config, {"encoder": choices[0]} if choices else {}, "fp32").encoder
    tokenizer = load_tokenizer(
        encoder, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
    )
    data = config.data
    windowings = [
        Windowing(length, data.long_text, data.stride_of(length), data.pair)
        for length in study_lengths(config)
    ]
    lengths = length_facts(dataset, tokenizer, windowings, runs_dir / "cache" / "tokens")
    name = encoder if isinstance(encoder, str) else str(encoder.get("tokenizer", "minilm"))
    return DataCheck(config.name, name, data.long_text, facts, lengths, data_advice(facts, lengths, config))


def class_table(task: TaskFacts) -> Rows:
    """A row for each class (rows and share) or span name (spans), the most frequent in training first."""
    if task.numbers:
        return [
            {"split": split, **{key: format_number(value) for key, value in numbers.items()}}
            for split, numbers in task.numbers.items()
        ]
    return [
        {
            "span name" if task.counts_spans else "class": label,
            **{
                split: f"{counts[label]:,}"
                if task.counts_spans
                else f"{counts[label]:,} ({_share(counts[label], task.num_annotated[split])})"
                for split, counts in task.counts.items()
            },
        }
        for label in sorted(task.labels, key=lambda label: -task.counts["train"][label])
    ]


def _count(num: int, total: int) -> str:
    return f"{num:,} ({_share(num, total)})" if num else "0"


def _share(num: int, total: int) -> str:
    return format_percent(num / total if total else 0.0)
