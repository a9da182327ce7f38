from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import yaml
from support.tiny import write_study

import hpo
from hpo.errors import InputError, StudyChangedError

PAIRS = {"ask": ["Who ran?", "Why?"] * 20, "answer": ["Ann ran.", ""] * 20, "right": ["yes", "no"] * 20}
DATA: dict[str, Any] = {
    "tasks": {"right": {"kind": "single_label"}},
    "columns": {"text": ["ask", "answer"], "labels": {"right": "right"}},
}


def test_frames_are_the_data_of_a_study(folder: Path) -> None:
    """A DataFrame and a Dataset with the same rows are the same data, and predictions take both."""
    content = yaml.safe_load(write_study(folder, data=DATA, n_trials=1).read_text())
    frame = pd.DataFrame(PAIRS)
    study = hpo.Study(content, data={"train": frame}, quiet=True)
    assert study.run().outcomes == {"complete": 1}
    again = hpo.Study(content, data={"train": datasets.Dataset.from_dict(PAIRS)}, quiet=True)
    again.export("model")
    model = hpo.load("model")
    predictions = model.predict(frame[:4])
    assert predictions == model.predict([*zip(PAIRS["ask"], PAIRS["answer"], strict=True)][:4])
    assert all(one["right"].label in ("yes", "no") for one in predictions)
    with pytest.raises(StudyChangedError, match="data"):
        hpo.Study(content, data={"train": frame[:30]}, quiet=True).run()


def test_frames_need_tasks_and_a_mapping(folder: Path) -> None:
    path = write_study(folder)
    for study in (path, yaml.safe_load(path.read_text())):
        with pytest.raises(InputError, match="takes a mapping with the keys of a study file"):
            hpo.Study(study, data={"train": pd.DataFrame(PAIRS)})
