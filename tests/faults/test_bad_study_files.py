"""Errors of study files: `file:line: key: requirement, value`."""

import copy
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.command_line import COMMANDS, hpo_command, refused
from support.worker_process import study

from hpo.config.study_config import load_study
from hpo.config.study_file import StudyFile, read_study_file
from hpo.errors import StudyFileError
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

LAUGHS = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{above}'] * 10)}]\n" for above, name in pairwise("abcdefghij")
)


def problems_of(folder: Path, text: str) -> list[str]:
    """Return the lines of the error, without the folder."""
    path = folder / "study.yaml"
    path.write_text(text)
    with pytest.raises(StudyFileError) as caught:
        load_study(path)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "").splitlines()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ": the file is empty. A study needs at least `name` and `data`."),
        ("name: s\ndata: [1,\n", ":3: this is not valid YAML: "),
        ("name: &a [*a]\n", ":1: this is not valid YAML: name.0: `*a` is an alias"),
        (LAUGHS, ":2: this is not valid YAML: b.0: `*a` is an alias, which is not read: write the value"),
        ("[" * 1000, ": this is not valid YAML: maximum recursion depth exceeded"),
        ("- name\n- data\n", ":1: a study file must be a mapping of keys such as `name:` and `data:`, but"),
    ],
)
def test_file_without_study_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems_of(tmp_path, text)
    assert found.startswith(f"study.yaml{problem}")


# Keys of a study, below `name: s` and synthetic data by default, and each line of the error.
CASES = """
path: x
  => 3: path: there is no such key. Did you mean `data.path`?
training:
  seed: 1
  pooling: cls
  seed: 2
  => 4: training.seed: the key is written twice, on lines 4 and 6. Keep one.
n_trials: 12.5
  => 3: n_trials: must be a whole number, but got `12.5`.
training: {optimizer: adamW}
  => 3: training.optimizer: must be one of adamw, adam, adafactor, lion, sgd, but got `adamW`. Did you mean
     `adamw`?
training: {fp_precision: bf61}
  => 3: training.fp_precision: no precision is called 'bf61'. Did you mean `bf16`?
objective: {metric: severity/mae}
  => 3: objective.direction: must be `minimize` for `severity/mae`: smaller is better.
name: a/b
data: {source: synthetic}
  => 1: name: must be letters, digits, `.`, `_` and `-`, at most 100, but got `a/b`.
data: {source: jsonl}
  => 2: data.path: must be given for jsonl, or else `files.train`.
data: {source: jsonl, path: x, tasks: {a: {kind: singel_label}, b: 3}}
  => 2: data.tasks.a.kind: must be one of single_label, multi_label, token_classification, span_extraction,
     span_per_label, regression, but got `singel_label`. Did you mean `single_label`?
  => 2: data.tasks.b: must be a mapping of keys, but got `3`.
search_space: {learning_rate: {type: float, low: 1e-2, high: 1e-3}}
  => 3: search_space.learning_rate.low: `low <= high` must hold, but got low 0.01 and high 0.001.
search_space: {weight_decay: {type: float, low: 0, high: 0.1, log: true}}
  => 3: search_space.weight_decay.low: `low > 0` must hold with `log: true`, but got 0.0.
search_space: {head_dropout: {type: float, low: 0, high: 0.5, step: 0.2}}
  => 3: search_space.head_dropout.high: must be `low` plus a multiple of `step`; 0.4 is, 0.5 is not.
search_space: {fp_precision: {type: categorical, choices: [bf16, bf16-mixed]}}
  => 3: search_space.fp_precision.choices.1: `bf16-mixed` means the same as `bf16`. Keep one.
search_space:
  fp_precision: {type: categorical, choices: [fp32, fp16]}
  init_scale: {type: categorical, choices: [1024, 65536], when: {fp_precison: fp16}}
  => 5: search_space.init_scale.when.fp_precison: must name another setting of `search_space`. Did you mean
     `fp_precision`?
search_space:
  fp_precision: {type: categorical, choices: [fp32, fp16]}
  init_scale: {type: categorical, choices: [1024, 65536], when: {fp_precision: [fp16, bf16]}}
  => 5: search_space.init_scale.when.fp_precision: `fp_precision` is never `bf16`: its choices are `fp32`,
     `fp16`.
training: {learning_rate: 1e-4}
search_space: {learning_rate: {type: float, low: 1e-5, high: 1e-3}}
  => 4: search_space.learning_rate: is fixed too, as `training.learning_rate`. Fix it or search it, not both.
training: {epochs: 1, max_steps: 5, max_seconds: 3}
  => 3: training: a trial has one budget, but epochs and max_steps and max_seconds are given. Keep one.
objective: [{metric: score}, {metric: train_examples_per_second}]
pruner: {name: hyperband}
  => 4: pruner.name: must be `promote` or `none` with several objectives.
sampler: {name: grid}
search_space:
  learning_rate: {type: float, low: 1e-5, high: 1e-3}
  => 5: search_space.learning_rate.step: must be given for a grid; or list the values as `choices`.
"""


def cases() -> Iterator[tuple[str, list[str]]]:
    """Yield the text and the messages of each case. A deeper line continues a message."""
    joined = re.sub(r"\n     +", " ", CASES)
    for text, messages in re.findall(r"((?:(?!  =>).+\n)+)((?:  => .+\n)+)", joined):
        yield text, [f"study.yaml:{message}" for message in re.findall("  => (.+)", messages)]


@pytest.mark.parametrize(("text", "problems"), [pytest.param(*case, id=case[0]) for case in cases()])
def test_wrong_key_is_one_error(tmp_path: Path, text: str, problems: list[str]) -> None:
    name = "" if text.startswith("name:") else "name: s\n"
    data = "" if re.search(r"(?m)^data:", text) else "data: {source: synthetic}\n"
    assert problems_of(tmp_path, name + data + text) == problems


def paths_in(content: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in `content`."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield (*where, key)
        if isinstance(value, (dict, list)):
            yield from paths_in(value, (*where, key))


STRANGE: list[Any] = [None, -1, float("nan"), "x", [], {}, [[]], {1: 2}]


def test_strange_value_anywhere_is_study_file_error(monkeypatch: pytest.MonkeyPatch) -> None:
    path = load_study("multitask").path
    original = read_study_file(path).content
    messages: list[str] = []
    for path_in in paths_in(original):
        for value in STRANGE:
            content = parent = copy.deepcopy(original)
            for key in path_in[:-1]:
                parent = parent[key]
            parent[path_in[-1]] = value
            file = StudyFile(path, content, {}, ())
            monkeypatch.setattr("hpo.config.study_config.read_study_file", lambda _, file=file: file)
            try:
                load_study(path)
            except StudyFileError as error:
                messages += str(error).splitlines()
    assert len(messages) > 200
    assert all(message.startswith(f"{path}:1: ") for message in messages)


OPTIONS = {
    "enqueue": ("--param", "learning_rate=1e-4"),
    "track": ("--to", "tensorboard"),
    "diagnose": ("--trial", "0"),
    "delete": ("--yes",),
    "copy": ("--to", "sqlite:///copy.db"),
    "submit": ("--slurm", "--dry-run"),
    "dashboard": ("--port", "0"),
}
WITHOUT_STUDY = ("studies", "new", "predict", "database start", "database stop", "database status")
BROKEN = {
    "syntax": ("name: m5\n  data: [\n", "Error: studies/syntax.yaml:2: this is not valid YAML: "),
    "unknown": ("name: x\nprunner: {}\n", "Error: studies/unknown.yaml:1: data: "),
    "empty": ("", "Error: studies/empty.yaml: the file is empty."),
    "bytes": (b"\xff\xfe\0", "Error: studies/bytes.yaml: the file must be text in UTF-8, but byte 0 "),
}


@pytest.fixture(scope="module", params=["without a database", "with a database"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of broken studies. The database has another study."""
    made = tmp_path_factory.mktemp("made")
    for name in ("studies", "folder", "runs"):
        (made / name).mkdir()
    for name, (content, _) in BROKEN.items():
        text = content if isinstance(content, bytes) else content.encode()
        (made / "studies" / f"{name}.yaml").write_bytes(text)
    if request.param == "with a database":
        with open_storage(f"sqlite:///{made}/runs/hpo.db") as storage:
            create_or_resume_study(storage, study(2, name="other"))
    return made


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {*WITHOUT_STUDY}))
def test_error_names_broken_file_or_missing_study(folder: Path, command: str) -> None:
    has_database = any((folder / "runs").iterdir())
    options = OPTIONS.get(command, ())
    for name, (_, message) in BROKEN.items() if has_database else [("syntax", BROKEN["syntax"])]:
        for word in (name, "studies/syntax.yaml") if name == "syntax" else (name,):
            finished = refused(hpo_command(folder, command, word, *options, width=400))
            assert finished.err.startswith(message), (word, finished.err)
            assert "There is no study" not in finished.err
    for word in ("there", "./folder") if has_database else ("",):
        finished = refused(hpo_command(folder, command, word, *options, width=400))
        assert finished.err.startswith("Error: "), (word, finished.err)
        assert finished.err.count("\n") == 1
        assert word.removeprefix("./") in finished.err or "There is no study database at" in finished.err
