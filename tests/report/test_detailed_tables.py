from __future__ import annotations

import dataclasses

from support.detailed_documents import class_row, document, every_kind, task_document
from support.study_records import tables_of, with_values

from hpo.report.detailed import Detailed, headline
from hpo.report.detailed_tables import (
    classes_text,
    confusions_text,
    detailed_evaluations,
    metrics_text,
)


def test_only_the_best_are_shown_and_what_the_search_has_not_seen_first() -> None:
    found = {split: document({}, split) for split in ("train", "validation", "test")}
    best = dataclasses.replace(with_values(0, (0.9,)), detailed=found)
    other = dataclasses.replace(with_values(1, (0.1,)), detailed=found)
    shown = detailed_evaluations(tables_of([best, other]))
    assert [(one.trial_number, one.split) for one in shown] == [(0, "test"), (0, "validation"), (0, "train")]
    front = tables_of(
        [dataclasses.replace(best, values=(0.9, 2.0)), dataclasses.replace(other, values=(0.1, 1.0))],
        metric_names=("score", "seconds"),
        directions=("maximize", "minimize"),
    )
    assert [one.trial_number for one in detailed_evaluations(front)] == [0, 0, 0, 1, 1, 1]


def test_classes_for_people_begin_with_the_most_frequent() -> None:
    rows = [class_row("rare", 1, 2, 1), class_row("weak", 1, 9, 9), class_row("strong", 9, 9, 9)]
    found = task_document("multi_label", {}, classes=[*rows, class_row("absent", 0, 0, 0)], threshold=0.41)
    table = classes_text(found)
    assert list(table["class"]) == ["weak", "strong", "rare", "absent"]
    assert list(table.iloc[0]) == ["weak", "0.111", "0.111", "0.111", "9", "9", "0.41"]
    assert list(table.iloc[-1]) == ["absent", "–", "–", "–", "0", "0", "0.41"]
    assert "threshold" not in classes_text({**found, "threshold": None})


def test_the_headline_is_the_score_or_the_first_metric_of_each_task() -> None:
    tasks = every_kind()["tasks"]
    told = headline(Detailed(6, "test", document(tasks)), []).replace("\u00a0", " ")
    assert told == "test, 500 rows: score 0.712 [0.682, 0.742] (best constant prediction 0.25)"
    two = {name: tasks[name] for name in ("tags", "stars")}
    told = headline(Detailed(6, "test", document(two, score=None, num_examples=1)), []).replace("\u00a0", " ")
    assert told == (
        "test, 1 row: tags/f1_macro 0.520 [0.490, 0.550] (best constant prediction 0.31), "
        "stars/r2 0.410 [0.380, 0.440] (best constant prediction 0)"
    )


def test_a_value_without_known_bounds() -> None:
    unknown = {"value": 0.41, "low": None, "high": None}
    one = Detailed(
        6, "test", document({"stars": task_document("regression", {}) | {"metrics": {"r2": unknown}}})
    )
    assert metrics_text(one).to_numpy().tolist()[-1] == ["stars", "r2", "0.410\u00a0[unknown]", "0"]
    assert list(metrics_text(one)) == ["task", "metric", "value [95%]", "best constant"]


def test_the_most_frequent_confusions_come_first() -> None:
    labels = [f"c{at}" for at in range(150)]
    counts = [[at, at, 500] for at in range(150)] + [[at, (at + 1) % 150, 1 + at] for at in range(150)]
    found = task_document("single_label", {}, confusion={"labels": labels, "counts": counts})
    table = confusions_text(found)
    assert table.iloc[:2].to_numpy().tolist() == [["c149", "c0", "150"], ["c148", "c149", "149"]]
    assert len(table) == 20
