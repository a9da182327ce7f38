"""A study with code of its own: trained, killed, resumed, exported; and who may have it run where."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sklearn.metrics import recall_score
from support.command_line import (
    finish,
    hpo_command,
    ok,
    saved_steps,
    start_hpo,
    start_python,
    stored,
    wait_until,
)
from support.jsonl_sets import write_set
from support.own_code_studies import EXAMPLE, NOTED, TASKS, TRAINING, write
from support.readme import README
from support.tiny import CPU, ENCODER, write_study
from support.worker_process import study

import hpo
from hpo.code import name_code, use_code
from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study, stored_study
from hpo.errors import InputError, StudyFileError
from hpo.study.store.schema import studies
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study
from hpo.tasks.kind import KINDS
from hpo.trial.compat import cache_key
from hpo.trial.trial_parts import TrialLoader, build_trial
from hpo.trial.trial_run import checkpoint_key

pytestmark = pytest.mark.usefixtures("forgotten")


def runs_of(code: Path) -> int:
    note = Path(f"{code}.ran")
    return len(note.read_text()) if note.exists() else 0


def refused(folder: Path, *arguments: str) -> str:
    """What a command says that ends with exit code 2, in a process of its own."""
    finished = finish(start_hpo(folder, *arguments))
    assert finished.exit_code == 2, finished
    assert "Traceback" not in finished.err
    return finished.err


def test_killed_resumed_exported_and_in_use(tmp_path: Path) -> None:
    """The whole way; and at each door other code is refused."""
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

    assert "needs the code `own_kind.py`" in refused(tmp_path, "best", "tiny", "--export", "model")
    ok(finish(start_hpo(tmp_path, "best", "tiny", "--export", "model", "--trust-code", "own_kind.py")))
    predict = ("predict", "model", str(tmp_path / "rows" / "test.jsonl"))
    assert "needs the code `own_kind.py`" in refused(tmp_path, *predict)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own_kind.py").write_text(EXAMPLE)
    other = refused(tmp_path, *predict, "--trust-code", "other/own_kind.py")
    assert "other/own_kind.py is other code: its hash is another" in other
    predicted = ok(finish(start_hpo(tmp_path, *predict, "--trust-code", "own_kind.py", "--json"))).json
    assert predicted["num_predictions"] == 20

    with pytest.raises(InputError, match="needs the code `own_kind"):
        hpo.load(tmp_path / "model", device="cpu")
    model = hpo.load(tmp_path / "model", device="cpu", code=code)
    rates = [one["times"].label for one in model.predict(["today", "it hurts it hurts it hurts today"])]
    assert 0 < rates[0] < rates[1]


def test_the_database_has_nothing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what lies on this machine, wherever that is, but what its user names."""
    made, here = tmp_path / "made", tmp_path / "here"
    made.mkdir()
    here.mkdir()
    ok(finish(start_hpo(made, "init", str(write(made)))))
    code = here / "own_kind.py"
    code.write_text(EXAMPLE + NOTED)
    monkeypatch.setenv("HPO_ALLOW", str(made / "rows"))
    url = f"sqlite:///{made}/runs/hpo.db"
    for name in (str(code), "own_kind", "own_kind.py"):  # as a definition may name it
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
    assert runs_of(code) == 3  # here and in each of the workers
    with open_storage(url, create=False) as storage:
        assert storage.trial_counts("tiny")["done"] == 2


def test_the_ranks_of_torchrun_run_the_code_that_the_first_names(tmp_path: Path) -> None:
    """Of a worker, only the first of them reads the study file."""
    path = write(tmp_path, n_trials=1, training=TRAINING | {"max_steps": 4})
    ok(hpo_command(tmp_path, "init", path.name))
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hpo")
    ended = finish(start_python(tmp_path, *module, "worker", path.name))
    assert ended.exit_code == 0, ended.err
    assert runs_of(tmp_path / "own_kind.py") == 3
    assert [trial.outcome for trial in stored(tmp_path).trials] == ["complete"]


def test_a_definition_is_read_without_its_code_but_not_trained(tmp_path: Path) -> None:
    definition = load_study(write(tmp_path)).definition()
    assert definition["code"] == {"own_kind.py": name_code(str(tmp_path / "own_kind.py")).sha256}
    assert "count" in KINDS
    load_study(write(tmp_path, "", code=[], data={"source": "synthetic"}, objective={"metric": "score"}))
    assert "count" not in KINDS, "a name is known where its study is in use"
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
        (
            EXAMPLE + "\n\nhpo.kind(type('C', (Count,), {}))\n",
            rf"py:{len(EXAMPLE.splitlines()) + 3}: ValueError: there is a kind of task `count`",
        ),
        (
            EXAMPLE.replace('"count"', '"regression"'),
            r"py:12: ValueError: there is a kind of task `regression`",
        ),
    ],
)
def test_an_error_in_the_code_has_its_line(tmp_path: Path, source: str, message: str) -> None:
    known = dict(KINDS)
    with pytest.raises(InputError, match=message):
        load_study(write(tmp_path, source))
    assert known == KINDS, "nothing is left of it"


def test_what_is_kept_belongs_to_the_code(tmp_path: Path) -> None:
    """Checkpoints, tokens with targets, and checks of precisions are not those of other code."""
    kept = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        config = load_study(write(tmp_path / str(number), EXAMPLE + f"# {number}\n"))
        resolved = resolve_study(config, CPU)
        parts = build_trial(resolved, {"learning_rate": 1e-3}, TrialLoader(resolved, tmp_path / "runs"))
        tokens = {path.name for path in (tmp_path / "runs" / "cache" / "tokens").iterdir() if path.is_dir()}
        kept.append((checkpoint_key("key", parts), cache_key(parts), len(tokens)))
    assert all(one != other for one, other in zip(*kept, strict=True)), kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gone.py", r"tiny\.yaml:\d+: code: .*gone\.py must be a file that can be read, but: No such file"),
        (
            "no_such_module",
            r"code: must be the path of a \.py file, or an installed module, but got `no_such",
        ),
        (7, r"code: must be a path or the name of a module, or a list of them, but got `7`"),
        (["own_kind.py", "./own_kind.py"], r"code: `own_kind\.py` is there twice"),
    ],
)
def test_a_key_that_names_no_code(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(StudyFileError, match=message):
        load_study(write(tmp_path, code=given))


def test_an_installed_package_names_its_code_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "acme_tasks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import kinds\n")
    (package / "kinds.py").write_text(EXAMPLE)
    metadata = tmp_path / "site" / "acme_tasks-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tasks\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[hpo.plugins]\nacme = acme_tasks\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    config = load_study(write(tmp_path, code="acme"))
    assert "count" in KINDS
    (package / "kinds.py").write_text(EXAMPLE + "# changed\n")
    assert name_code("acme").sha256 != config.code["acme"]


def test_two_studies_have_each_its_own_code_under_one_name(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        load_study(write(tmp_path / str(number), EXAMPLE + f"\nCount.number = {number}\n"))
        assert KINDS["count"].number == number  # type: ignore[attr-defined]
    first = {"own_kind.py": name_code(str(tmp_path / "0" / "own_kind.py")).sha256}
    with pytest.raises(InputError, match=r"own_kind\.py: there is a kind of task `count` already"):
        use_code(first, "A model", stays=True)


def test_batch_jobs_of_a_stored_study_get_the_code_that_their_user_names(tmp_path: Path) -> None:
    """The name of a study alone brings no code, whatever the database says about it."""
    code = tmp_path / "mine" / "own_kind.py"
    code.parent.mkdir()
    code.write_text(EXAMPLE)
    url = f"sqlite:///{tmp_path}/hpo.db"
    with open_storage(url) as storage:
        create_or_resume_study(storage, study(2, name="stored"))
    options = ("--slurm", "--dry-run", "--storage", url)

    def trusted(*more: str) -> list[str]:
        script = ok(hpo_command(tmp_path, "submit", "stored", *options, *more)).out
        return re.findall(r"--trust-code (\S+)", script)

    assert not trusted()
    file, module = trusted("--trust-code", str(code), "--trust-code", "yaml")
    assert re.fullmatch(rf"{tmp_path}/runs/stored/slurm-[\w-]+/own_kind\.py", file)
    assert module == "yaml"


# The README's code of one's own

(README_CODE,) = re.findall(
    r"```python\n(.*?)```", README.read_text().split("## Your own code", 1)[1].split("\n## ")[0], re.DOTALL
)
MOODS = {"topic": {"kind": "single_label", "classes": ["bad", "good"]}}


def readme_rows(split: str, size: int) -> list[dict[str, object]]:
    words = ("late again", "all is well")
    return [
        {"id": f"{split}-{n}", "text": f"{words[n % 2]} {n}", "labels": {"topic": ["bad", "good"][n % 2]}}
        for n in range(size)
    ]


def test_the_code_of_the_readme_is_compared_exported_loaded_and_deployed(tmp_path: Path) -> None:
    assert len(README_CODE.splitlines()) <= 22
    (tmp_path / "my_tasks.py").write_text(README_CODE)
    write_set(
        tmp_path / "rows",
        MOODS,
        train=readme_rows("t", 60),
        validation=readme_rows("v", 24),
        test=readme_rows("e", 24),
    )
    write_study(
        tmp_path,
        code="my_tasks.py",
        n_trials=2,
        data={"source": "jsonl", "path": "rows"},
        model={"encoder": ENCODER},
        objective={"metric": "topic/worst_recall"},
        training={"max_steps": 80, "batch_size": 8, "max_length": 16, "head_type": "gated", "loss": "poly1"},
        search_space={
            "gated.width": {"type": "int", "low": 4, "high": 16},
            "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
            "learning_rate": {"type": "float", "low": 2e-3, "high": 4e-3},
        },
    )
    ok(finish(start_hpo(tmp_path, "run", "tiny.yaml")))
    assert [trial.outcome for trial in stored(tmp_path).trials] == ["complete", "complete"]

    options = ("--precisions", "bf16", "--top", "1", "--seeds", "3", "--max-seeds", "3", "--json")
    compared = ok(finish(start_hpo(tmp_path, "compare", "tiny.yaml", *options), 300)).json
    (verdict,) = compared["verdicts"]
    assert (verdict["metric"], verdict["num_runs"], verdict["num_rows"]) == ("topic/worst_recall", 3, 24), (
        compared
    )

    ok(finish(start_hpo(tmp_path, "best", "tiny.yaml", "--export", "model")))
    model = hpo.load(tmp_path / "model", device="cpu", code=tmp_path / "my_tasks.py")
    answers = [
        one["topic"].label for one in model.predict([str(row["text"]) for row in readme_rows("e", 24)])
    ]
    scored = ok(finish(start_hpo(tmp_path, "best", "tiny.yaml", "--evaluate", "test", "--json"))).json
    found = scored["evaluation"]["metrics"]["topic"]["worst_recall"]
    assert found == recall_score(["bad", "good"] * 12, answers, average=None).min() > 0.9, scored

    deployed = ok(finish(start_hpo(tmp_path, "deploy", "tiny.yaml", "--json"), 300)).json
    assert deployed["objective"] == "topic/worst_recall"
    assert {"fp32", "onnx_fp32"} <= {one["artifact"] for one in deployed["artifacts"]}, deployed
    assert deployed["test"]["fp32_score"]["value"] == found
