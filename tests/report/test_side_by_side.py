"""Studies side by side: as the command writes them, and where they do not compare."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from browser import without_plotly
from command_line import hpo_command, ok
from study_records import fake_record
from tiny import write_study

from hpo.errors import InputError
from hpo.report.side_by_side import NO_VERDICT, side_by_side_html, write_side_by_side


def test_two_real_studies_are_side_by_side(tmp_path: Path) -> None:
    for name, num_train in (("one", 32), ("other", 16)):
        sizes = {"num_train": num_train, "num_validation": 16, "num_test": 16, "max_sentences": 4}
        data = {"source": "synthetic", "synthetic": sizes}
        study = write_study(tmp_path, name=name, n_trials=1, data=data)
        ok(hpo_command(tmp_path, "run", str(study)))
        study.unlink()
    found = ok(hpo_command(tmp_path, "report", "one", "other", "--out", "out", "--json")).json
    assert found == {"studies": ["one", "other"], "report": "out/report.html"}
    page = without_plotly(tmp_path / "out" / "report.html")
    assert re.search(r"<th></th><th>one</th><th>other</th>", page)
    assert page.count("<td>1 of 1</td>") == 2
    assert "They have different data: their scores do not compare." in page
    assert NO_VERDICT in page
    assert '<div id="best_so_far_1"' in page


def test_what_does_not_compare_is_refused(tmp_path: Path) -> None:
    one = fake_record()
    other = dataclasses.replace(one, name="other", metric_names=("criteria/f1_micro",))
    data = {one.name: "a", "other": "a"}
    with pytest.raises(InputError, match=r"must have the same objective, but `.*` has maximize"):
        write_side_by_side([one, other], data, tmp_path)
    with pytest.raises(InputError, match="must be named once"):
        write_side_by_side([one, one], data, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_study_without_a_complete_trial_has_dashes() -> None:
    one = fake_record()
    empty = dataclasses.replace(one, name="empty", trials=[])
    page = side_by_side_html([one, empty], {one.name: None, "empty": None})
    assert "Whether they have the same data is not known." in page
    assert "<td>0 of 0</td>" in page
    same = side_by_side_html([one, empty], {one.name: "a", "empty": "a"})
    assert "different data" not in same
    assert "the same data is not known" not in same
