"""A study's own code: training, kill, resume, export, and trust."""

import hashlib
import json
import re
import signal
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from sklearn.metrics import recall_score
from support.command_line import finish, hpo_command, ok, saved_steps, start_hpo, stored, wait_until
from support.jsonl_sets import write_set
from support.own_code_studies import EXAMPLE, NOTED, TASKS, write
from support.readme import README
from support.tiny import executor_of, parts_of, write_study
from support.worker_process import study

import hpo
from hpo.code import errors_of_code, name_code, use_code
from hpo.config.study_config import load_study, stored_study
from hpo.errors import InputError
from hpo.study.store.schema import studies
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study
from hpo.tasks.kind import KINDS
from hpo.trial.compat import cache_key
from hpo.trial.run import checkpoint_key

pytestmark = pytest.mark.usefixtures("forgotten")
NEEDED = "needs the code `own_kind.py`"


def runs_of(code: Path) -> int:
    note = Path(f"{code}.ran")
    return len(note.read_text()) if note.exists() else 0


def refused(folder: Path, *arguments: str) -> str:
    """Return the error of a command in a new process."""
    finished = finish(start_hpo(folder, *arguments))
    assert (finished.exit_code, "Traceback" in finished.err) == (2, False), finished
    return finished.err


def test_killed_study_is_resumed_exported_and_loaded_only_with_its_code(tmp_path: Path) -> None:
    write(tmp_path, checkpoint={"every_seconds": 0.1}, evaluation={"per_trial": 4}, n_trials=1)
    process = start_hpo(tmp_path, "run", "tiny.yaml")
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    assert stored(tmp_path).counts["done"] == 0, "killed too late to test anything"

    code = tmp_path / "own_kind.py"
    code.write_text(EXAMPLE + NOTED + "# changed\n")
    assert re.search(r'~ code\.own_kind\.py: "\w{64}" -> "\w{64}"', refused(tmp_path, "run", "tiny.yaml"))
    code.write_text(EXAMPLE + NOTED)
    ok(finish(start_hpo(tmp_path, "run", "tiny.yaml")))
    (trial,) = stored(tmp_path).trials
    assert trial.outcome == "complete"
    assert trial.telemetry["resumed_from_step"] > 0

    export = ("best", "tiny", "--export", "model")
    assert NEEDED in refused(tmp_path, *export)
    ok(finish(start_hpo(tmp_path, *export, "--trust-code", "own_kind.py")))
    predict = ("predict", "model", str(tmp_path / "rows" / "test.jsonl"))
    assert NEEDED in refused(tmp_path, *predict)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own_kind.py").write_text(EXAMPLE)
    other = refused(tmp_path, *predict, "--trust-code", "other/own_kind.py")
    assert "other/own_kind.py is other code: its hash is another" in other
    with pytest.raises(InputError, match="needs the code `own_kind"):
        hpo.load(tmp_path / "model", device="cpu")
    model = hpo.load(tmp_path / "model", device="cpu", code=code)
    rates = [one["times"].label for one in model.predict(["today", "it hurts it hurts it hurts today"])]
    assert 0 < rates[0] < rates[1]


def test_a_database_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, here = tmp_path / "made", tmp_path / "here"
    made.mkdir()
    here.mkdir()
    ok(finish(start_hpo(made, "init", str(write(made)))))
    code = here / "own_kind.py"
    code.write_text(EXAMPLE + NOTED)
    monkeypatch.setenv("HPO_ALLOW", str(made / "rows"))
    url = f"sqlite:///{made}/runs/hpo.db"
    for name in (str(code), "own_kind", "own_kind.py"):  # possible names in a definition
        with open_storage(url) as storage, storage.engine.begin() as connection:
            definition = json.loads(connection.execute(sa.select(studies)).one().definition)
            changed = definition | {"code": {name: hashlib.sha256(code.read_bytes()).hexdigest()}}
            connection.execute(sa.update(studies).values(definition=json.dumps(changed)))
        for command in (("worker", "tiny"), ("verify", "tiny")):
            refusal = hpo_command(here, *command, "--storage", url)
            assert (refusal.exit_code, f"needs the code `{name}`" in refusal.err) == (2, True)
        assert "0 of 2 trials ended" in ok(hpo_command(here, "status", "tiny", "--storage", url)).out
    assert runs_of(code) == 0
    trusted = ("worker", "tiny", "--storage", url, "--trust-code", "own_kind.py", "--workers", "2")
    ok(finish(start_hpo(here, *trusted)))
    assert runs_of(code) == 3, "here and in each worker"
    with open_storage(url, create=False) as storage:
        assert storage.trial_counts("tiny")["done"] == 2


def test_definition_can_be_read_without_its_code(tmp_path: Path) -> None:
    definition = load_study(write(tmp_path)).definition()
    assert definition["code"] == {"own_kind.py": name_code(str(tmp_path / "own_kind.py")).sha256}
    assert "count" in KINDS
    load_study(write(tmp_path, "", code=[], data={"source": "synthetic"}, objective={"metric": "score"}))
    assert "count" not in KINDS, "another study is in use"
    assert stored_study("tiny", definition).data.tasks == {"tasks": TASKS}
    del definition["code"]
    with pytest.raises(InputError, match=r"data\.tasks\.times\.kind: must be one of .*, but got `count`"):
        stored_study("tiny", definition)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import hpo\n\nclass\n", r"own_kind\.py:3: SyntaxError: invalid syntax"),
        ("\n\nraise SystemExit(3)\n", r"own_kind\.py:3: SystemExit: 3"),
        ("def f():\n    return {}['a']\n\nf()\n", r"own_kind\.py:2: KeyError: 'a'"),
        (EXAMPLE.replace('"count"', '"regression"'), r"py:12: ValueError: there is a kind of task"),
    ],
)  # fmt: skip
def test_line_of_an_error(tmp_path: Path, source: str, message: str) -> None:
    known = dict(KINDS)
    with pytest.raises(InputError, match=message):
        load_study(write(tmp_path, source))
    assert known == KINDS, "failed code adds nothing"


def test_line_of_an_error_in_one_of_two_equal_files(tmp_path: Path) -> None:
    """The code runs once, from the first file."""
    source = f"{EXAMPLE}\n\ndef fail():\n    raise KeyError('a')\n"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        load_study(write(tmp_path / name, source))
    module = sys.modules[f"hpo_code_{hashlib.sha256(source.encode()).hexdigest()[:16]}"]
    with pytest.raises(InputError, match=r"first/own_kind\.py:\d+: KeyError"), errors_of_code():
        module.fail()


def test_caches_and_checkpoints_depend_on_the_code(tmp_path: Path) -> None:
    keys = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        executor = executor_of(write(tmp_path / str(number), EXAMPLE + f"\nCount.number = {number}\n"))
        assert KINDS["count"].number == number, "the code of the last study is in use"
        parts = parts_of(executor, learning_rate=1e-3)
        tokens = {path.name for path in tmp_path.glob(f"{number}/runs/cache/tokens/*/")}
        keys.append((checkpoint_key("key", parts), cache_key(parts), tokens))
    assert all(one != other for one, other in zip(*keys, strict=True)), keys
    first = {"own_kind.py": name_code(str(tmp_path / "0" / "own_kind.py")).sha256}
    with pytest.raises(InputError, match=r"own_kind\.py: there is a kind of task `count` already"):
        use_code(first, "A model", stays=True)


def test_entry_point_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, metadata = tmp_path / "site" / "acme_tasks", tmp_path / "site" / "acme_tasks-1.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text("from . import kinds\n")
    (package / "kinds.py").write_text(EXAMPLE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tasks\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[hpo.plugins]\nacme = acme_tasks\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    config = load_study(write(tmp_path, code="acme"))
    assert "count" in KINDS
    (package / "kinds.py").write_text(EXAMPLE + "# changed\n")
    assert name_code("acme").sha256 != config.code["acme"]


def test_batch_jobs_get_only_trusted_code(tmp_path: Path) -> None:
    code = tmp_path / "mine" / "own_kind.py"
    code.parent.mkdir()
    code.write_text(EXAMPLE)
    url = f"sqlite:///{tmp_path}/hpo.db"
    with open_storage(url) as storage:
        create_or_resume_study(storage, study(2, name="stored"))
    submit = ("submit", "stored", "--slurm", "--dry-run", "--storage", url)
    assert "--trust-code" not in ok(hpo_command(tmp_path, *submit)).out
    script = ok(hpo_command(tmp_path, *submit, "--trust-code", str(code), "--trust-code", "yaml")).out
    file, module = re.findall(r"--trust-code (\S+)", script)
    assert re.fullmatch(rf"{tmp_path}/runs/stored/slurm-[\w-]+/own_kind\.py", file)
    assert module == "yaml"


SECTION = README.read_text().split("## Your own code", 1)[1].split("\n## ")[0]
(README_CODE,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def test_code_of_the_readme(tmp_path: Path) -> None:
    """A study with it runs, is compared, exported, loaded and deployed."""

    def rows(size: int) -> list[dict[str, object]]:
        posts = [("late again", "bad"), ("all is well", "good")] * (size // 2)
        rows = ({"text": f"{text} {n}", "labels": {"topic": label}} for n, (text, label) in enumerate(posts))
        return [{"id": f"{size}-{n}", **row} for n, row in enumerate(rows)]

    assert len(README_CODE.splitlines()) <= 22
    (tmp_path / "my_tasks.py").write_text(README_CODE)
    tasks = {"topic": {"kind": "single_label", "classes": ["bad", "good"]}}
    write_set(tmp_path / "rows", tasks, train=rows(60), validation=rows(24), test=rows(26))
    training = {"max_steps": 80, "batch_size": 8, "max_length": 16, "head_type": "gated", "loss": "poly1"}
    space = {
        "gated.width": {"type": "int", "low": 4, "high": 16},
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
        "learning_rate": {"type": "float", "low": 2e-3, "high": 4e-3},
    }
    study = {"code": "my_tasks.py", "training": training, "search_space": space}
    data, objective = {"source": "jsonl", "path": "rows"}, {"metric": "topic/worst_recall"}
    write_study(tmp_path, **study, data=data, objective=objective)
    ok(finish(start_hpo(tmp_path, "run", "tiny.yaml")))
    assert [trial.outcome for trial in stored(tmp_path).trials] == ["complete", "complete"]

    options = ("--precisions", "bf16", "--top", "1", "--seeds", "3", "--max-seeds", "3", "--anyway", "--json")
    compared = ok(finish(start_hpo(tmp_path, "compare", "tiny.yaml", *options), 300)).json
    (verdict,) = compared["verdicts"]
    assert (verdict["metric"], verdict["num_runs"], verdict["num_rows"]) == ("topic/worst_recall", 3, 26)

    ok(finish(start_hpo(tmp_path, "best", "tiny.yaml", "--export", "model")))
    model = hpo.load(tmp_path / "model", device="cpu", code=tmp_path / "my_tasks.py")
    answers = [one["topic"].label for one in model.predict([str(row["text"]) for row in rows(26)])]
    scored = ok(finish(start_hpo(tmp_path, "best", "tiny.yaml", "--evaluate", "test", "--json"))).json
    recall = scored["evaluation"]["metrics"]["topic"]["worst_recall"]
    assert recall == recall_score(["bad", "good"] * 13, answers, average=None).min() > 0.9, scored

    deployed = ok(finish(start_hpo(tmp_path, "deploy", "tiny.yaml", "--json"), 300)).json
    assert deployed["objective"] == "topic/worst_recall"
    assert deployed["test"]["fp32_score"]["value"] == recall
