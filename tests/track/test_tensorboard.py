from pathlib import Path
from typing import Any

import pytest
from support.tracked_study import TrackedStudy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from hpo.track.follow import Follower
from hpo.track.tensorboard_files import TensorboardTracker


def read(folder: Path) -> Any:
    return EventAccumulator(str(folder), purge_orphaned_data=False).Reload()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each scalar; check that no point is repeated."""
    reader = read(folder)
    found = {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    for points in found.values():
        assert len({step for step, _ in points}) == len(points)
    return found


def hparams(folder: Path) -> dict[str, Any]:
    content = read(folder).SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    values = parse_session_start_info_plugin_data(content).hparams
    return {name: value.string_value or value.number_value for name, value in values.items()}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_trial_is_one_folder(tracked: TrackedStudy) -> None:
    tracked.run("complete", "nonfinite")
    tracked.leave_running()
    answer = tracked.tracked("tensorboard")
    folder = tracked.folder / "runs" / tracked.name / "tensorboard"
    assert (answer["trials"], answer["changed"]) == (3, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["study", "trial-0", "trial-1", "trial-2"]
    points = scalars(folder / "trial-0")
    assert points["criteria/f1_macro"] == [(step, pytest.approx(step / 100)) for step in (10, 20, 30)]
    assert points["trial/score"] == [(30, 0.5)]
    settings = hparams(folder / "trial-1")
    assert settings["learning_rate"] == tracked.record.trials[1].params["learning_rate"]
    assert (settings["outcome"], settings["weight_decay"]) == ("nonfinite", 0.01)
    (event,) = read(folder / "trial-0").Tensors("settings/text_summary")
    assert "| precision_agrees | false |" in event.tensor_proto.string_val[0].decode()
    assert scalars(folder / "study")["best/score"] == [(2, 0.5)]

    before = files(folder)
    assert tracked.tracked("tensorboard")["changed"] == 0
    assert files(folder) == before
    tracked.run("complete")  # continues the trial of the dead worker
    assert tracked.tracked("tensorboard")["changed"] == 1
    assert len(scalars(folder / "trial-2")["score"]) == 3
    assert hparams(folder / "trial-2")["outcome"] == "complete"


def test_command_after_kill_repeats_no_point(tracked: TrackedStudy) -> None:
    trial = tracked.leave_running(alive=True)
    folder = tracked.folder / "other"
    token = tracked.storage.study_token(tracked.name)
    killed = Follower(lambda: tracked.record, token, TensorboardTracker(folder, token))
    killed.update()
    tracked.evaluate(trial, 2)
    killed.update()  # never closes its file
    assert len(scalars(folder / "trial-0")["score"]) == 2
    tracked.evaluate(trial, 3)
    assert tracked.tracked("tensorboard", "--folder", str(folder))["changed"] == 1
    assert [step for step, _ in scalars(folder / "trial-0")["score"]] == [10, 20, 30]
