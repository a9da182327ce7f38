"""Samplers and pruners that are classes of other packages, of OptunaHub, or of the study's own code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support import command_line
from support.command_line import finish, hpo_command, ok, start_hpo, stored
from support.own_code_studies import write
from support.scripted_study import ScriptedStudy
from support.tiny import write_study
from support.worker_process import SPACE, study

from hpo import code
from hpo.config.study_config import StudyConfig, load_study
from hpo.errors import InputError, RunError, StudyFileError
from hpo.study.sampling.named_class import REGISTRY
from hpo.study.sampling.samplers import build_pruner, check_named
from hpo.study.store.schema import studies
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

pytestmark = pytest.mark.usefixtures("forgotten")

MODULE = '''
from pathlib import Path

from optuna.pruners import BasePruner
from optuna.samplers import RandomSampler

Path(__file__ + ".ran").write_text("yes")
SEEDS = []


class Lowest(RandomSampler):
    """Proposes the lowest number or the first choice, plus `shift`."""

    def __init__(self, shift=0.0, seed=None):
        super().__init__(seed)
        self.shift = shift
        SEEDS.append(seed)

    def sample_independent(self, study, trial, name, distribution):
        low = getattr(distribution, "low", None)
        return distribution.choices[0] if low is None else low + self.shift


class Failing(RandomSampler):
    def sample_independent(self, *_):
        raise KeyError("no surrogate")


class Third(BasePruner):
    """Stops a trial from its evaluation number `first` on."""

    def __init__(self, first=3):
        self.first = first

    def prune(self, study, trial):
        return trial.last_step >= self.first


class NoSampler:
    pass


def function():
    return None
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the importable module `acme_search`."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "acme_search.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(command_line, "PYTHON_PATH", f"{site}{os.pathsep}{command_line.PYTHON_PATH}")
    monkeypatch.delitem(sys.modules, "acme_search", raising=False)
    return site / "acme_search.py"


def check_study(config: StudyConfig) -> None:
    """Check the sampler and the pruner of a user's own study file."""
    check_named(config, config)


def has_run(module: Path) -> bool:
    return Path(f"{module}.ran").exists()


@pytest.mark.usefixtures("package")
def test_a_class_proposes_with_its_options_and_a_seed_for_each_worker() -> None:
    config = study(4, sampler={"name": "acme_search.Lowest", "shift": 1e-5, "seed": 7}, search_space=SPACE)
    tried = ScriptedStudy(config).run(2)
    low = SPACE["learning_rate"]["low"]
    assert [one["learning_rate"] for one in tried] == pytest.approx([low + 1e-5] * 2)
    ScriptedStudy(config, worker_number=3)
    assert sys.modules["acme_search"].SEEDS == [7, 10]


@pytest.mark.usefixtures("package")
def test_a_class_draws_only_what_the_device_runs_and_avoids_what_cannot_work() -> None:
    config = study(4, sampler={"name": "optuna.samplers.RandomSampler", "seed": 1}, search_space=SPACE)

    def script(params: dict[str, Any]) -> Any:
        return "nonfinite" if params["fp_precision"] == "fp16" else 0.5

    tried = ScriptedStudy(config, script, skipped={"bf16"}).run(60)
    precisions = [one["fp_precision"] for one in tried]
    assert "bf16" not in precisions
    assert precisions[-40:].count("fp16") <= 4


def test_cma_es_searches_numbers() -> None:
    pytest.importorskip("cmaes", reason="the package cmaes is not installed")
    space = {"learning_rate": SPACE["learning_rate"], "dropout": {"type": "float", "low": 0.0, "high": 0.5}}
    name = "optuna.samplers.CmaEsSampler"
    config = study(
        60, sampler={"name": name, "seed": 3, "warn_independent_sampling": False}, search_space=space
    )
    check_study(config)
    scripted = ScriptedStudy(config, lambda params: -abs(params["dropout"] - 0.4))
    tried = scripted.run(60)
    errors = [abs(one["dropout"] - 0.4) for one in tried]
    assert sum(errors[-15:]) < sum(errors[:15]) / 2
    assert any("cma:" in key for trial in scripted.trials for key in trial.system_attrs)


@pytest.mark.usefixtures("package")
def test_a_pruner_stops_trials_and_the_trials_have_values(tmp_path: Path) -> None:
    write_study(
        tmp_path,
        sampler={"name": "acme_search.Lowest"},
        pruner={"name": "acme_search.Third", "first": 2},
        training={"max_steps": 8, "batch_size": 8, "max_length": 32, "dropout": 0.0},
        evaluation={"per_trial": 4},
    )
    ended = finish(start_hpo(tmp_path, "run", "tiny.yaml", "--workers", "2"))
    assert "2 trials, none complete." in ended.out, ended
    trials = stored(tmp_path).trials
    assert [(trial.outcome, len(trial.evaluations)) for trial in trials] == [("pruned", 2)] * 2
    assert {trial.params["learning_rate"] for trial in trials} == {1e-4}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"name": "acme_search.Gone"}, "the module `acme_search` has no `Gone`"),
        ({"name": "no_such_package.Sampler"}, "cannot be imported: ModuleNotFoundError: No module named"),
        ({"name": "acme_search.NoSampler"}, "must be a subclass of optuna's BaseSampler, but it is <class"),
        ({"name": "acme_search.Third"}, "must be a subclass of optuna's BaseSampler"),
        ({"name": "acme_search.Lowest", "shft": 1}, "cannot be made: TypeError: .*'shft'"),
        (
            {"name": "acme_search.Lowest", "shift": 1e9},
            "must propose a value of FloatDistr.* for learn",
        ),
        (
            {"name": "acme_search.Failing"},
            r"Failing` failed: KeyError: 'no surrogate'\. This was",
        ),
    ],
)
def test_a_class_that_cannot_sample_is_refused_before_the_study_is_made(
    tmp_path: Path, sampler: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_study(load_study(write_study(tmp_path, sampler=sampler)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": {"name": "bayes"}}, r"sampler\.name: must be one of tpe, gp, .*, but got `bayes`"),
        ({"sampler": {"name": "my_package.sampler"}}, r"sampler\.name: must be one of tpe"),
        ({"sampler": {"name": "optunahub:samplers/../../x"}}, r"sampler\.name: must be one of tpe"),
        ({"sampler": {"name": "tpe", "shift": 1}}, r"sampler\.shift: there is no such key"),
        (
            {
                "pruner": {"name": "acme_search.Third"},
                "objective": [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}],
            },
            r"pruner\.name: must be `promote` or `none` with several objectives",
        ),
    ],
)
def test_a_name_or_an_option_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StudyFileError, match=message):
        load_study(write_study(tmp_path, **changes))


@pytest.mark.usefixtures("package")
def test_the_command_refuses_a_class_in_one_line(tmp_path: Path) -> None:
    write_study(tmp_path, sampler={"name": "acme_search.NoSampler"})
    refused = hpo_command(tmp_path, "run", "tiny.yaml", width=1000)
    assert refused.exit_code == 2
    assert "must be a subclass of optuna's BaseSampler" in refused.err
    assert "Traceback" not in refused.err
    assert not (tmp_path / "runs" / "hpo.db").exists()


@pytest.mark.parametrize("section", ["sampler", "pruner"])
def test_a_class_that_only_the_database_names_is_not_imported(
    tmp_path: Path, package: Path, section: str
) -> None:
    ok(finish(start_hpo(tmp_path, "init", str(write_study(tmp_path)))))
    url = f"sqlite:///{tmp_path}/runs/hpo.db"
    name = {"sampler": "acme_search.Lowest", "pruner": "acme_search.Third"}[section]
    with open_storage(url) as storage, storage.engine.begin() as connection:
        definition = json.loads(connection.execute(sa.select(studies)).one().definition)
        definition[section]["name"] = name
        connection.execute(sa.update(studies).values(definition=json.dumps(definition)))
    refused = finish(start_hpo(tmp_path, "worker", "tiny", "--storage", url))
    assert refused.exit_code == 2
    assert f"asks to run the class `{name}`" in " ".join(refused.err.split())
    ok(finish(start_hpo(tmp_path, "status", "tiny", "--storage", url)))
    assert not has_run(package)
    trusted = start_hpo(tmp_path, "worker", "tiny", "--storage", url, "--trust-code", name, "--workers", "2")
    ok(finish(trusted))
    assert has_run(package)
    assert stored(tmp_path).counts["done"] == 2


def test_batch_jobs_get_the_classes_of_the_study(tmp_path: Path) -> None:
    name = "optuna.samplers.CmaEsSampler"
    write_study(tmp_path, sampler={"name": name})
    url = f"sqlite:///{tmp_path}/hpo.db"
    with open_storage(url) as storage:
        create_or_resume_study(storage, study(2, name="stored"))
    options = ("--slurm", "--dry-run", "--storage", url)
    assert f"--trust-code {name}" in ok(hpo_command(tmp_path, "submit", "tiny.yaml", *options)).out
    named = hpo_command(tmp_path, "submit", "stored", *options, "--trust-code", name)
    assert f"--trust-code {name}" in ok(named).out


HUB_SAMPLER = """
from optuna.samplers import RandomSampler

__all__ = ["AutoSampler", "other"]
other = 1


class AutoSampler(RandomSampler):
    pass
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of OptunaHub's registry with two packages."""
    pytest.importorskip("optunahub", reason="the package optunahub is not installed")
    for name, source in {
        "auto_sampler": HUB_SAMPLER,
        "two": HUB_SAMPLER + "\n\nclass Second(AutoSampler):\n    pass\n\n\n__all__ += ['Second']\n",
        "shown": "from optuna.samplers import RandomSampler\n\n__all__ = ['RandomSampler']\n",
        "broken": "import no_such_dependency\n",
    }.items():
        folder = tmp_path / "registry" / "samplers" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
    monkeypatch.setenv(REGISTRY, str(tmp_path / "registry"))
    return tmp_path / "registry"


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", ["auto_sampler", "two:Second", "two@v1:AutoSampler", "shown"])
def test_a_sampler_of_optunahub(name: str) -> None:
    config = study(4, sampler={"name": f"optunahub:samplers/{name}"}, search_space=SPACE)
    check_study(config)
    assert len(ScriptedStudy(config).run(2)) == 2


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("samplers/two", "must name a package with one sampler, but it has AutoSampler, Second"),
        ("samplers/gone", "cannot be loaded from the folder .*registry"),
        ("samplers/broken", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("samplers/auto_sampler:Other", "must be a subclass of optuna's BaseSampler, but it is None"),
    ],
)
def test_a_package_of_optunahub_that_cannot_be_used(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_study(study(4, sampler={"name": f"optunahub:{name}"}, search_space=SPACE))


def test_without_the_package_optunahub_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optunahub", None)
    with pytest.raises(InputError, match=r"needs the package optunahub.*`make install EXTRAS=optunahub`"):
        check_study(study(4, sampler={"name": "optunahub:samplers/auto_sampler"}, search_space=SPACE))


def test_without_a_network_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offline:
        def load_module(self, package: str, ref: str) -> None:
            raise OSError(f"no route to host for {package} at {ref}")

    monkeypatch.setitem(sys.modules, "optunahub", Offline())
    monkeypatch.delenv(REGISTRY, raising=False)
    with pytest.raises(InputError, match=f"from OptunaHub: OSError: no route.*{REGISTRY}"):
        check_study(study(4, sampler={"name": "optunahub:samplers/auto_sampler"}, search_space=SPACE))


OWN = """
import optuna

import hpo


class Share(hpo.Section):
    share: float = 0.5


@hpo.sampler("lucky", Share)
def lucky(options, seed):
    assert options.share == 0.25
    return optuna.samplers.RandomSampler(seed=seed)


@hpo.pruner("hasty")
def hasty(options):
    return optuna.pruners.ThresholdPruner(upper=-1.0)


@hpo.sampler("wrong")
def wrong(options, seed):
    return optuna.pruners.NopPruner()
"""


def test_a_sampler_and_a_pruner_of_the_studys_own_code(tmp_path: Path) -> None:
    changes = {"data": {"source": "synthetic"}, "objective": {"metric": "score"}}
    path = write(tmp_path, OWN, sampler={"name": "lucky", "share": 0.25}, pruner={"name": "hasty"}, **changes)
    config = load_study(path)
    check_study(config)
    assert build_pruner(config.pruner)
    with pytest.raises(StudyFileError, match=r"sampler\.shre: there is no such key"):
        load_study(write(tmp_path, OWN, sampler={"name": "lucky", "shre": 0.25}, **changes))
    with pytest.raises(InputError, match=r"an instance of optuna's BaseSampler, but got <optuna\.pruners"):
        check_study(load_study(write(tmp_path, OWN, sampler={"name": "wrong"}, **changes)))


def test_an_error_while_the_study_runs_names_the_sampler(package: Path) -> None:
    config = study(4, sampler={"name": "acme_search.Failing"}, search_space=SPACE)
    with pytest.raises(RunError, match=r"The sampler `acme_search\.Failing` failed: KeyError"):
        ScriptedStudy(config).run(1)
    assert code.is_class_name("acme_search.Failing")
    assert has_run(package)
