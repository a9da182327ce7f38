"""Samplers and pruners from other packages, from OptunaHub, or from the study's own code."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
from support import command_line
from support.command_line import change_definition, finish, hpo_command, ok, refused, start_hpo, stored
from support.own_code_studies import write
from support.scripted_study import ScriptedStudy
from support.tiny import write_study
from support.worker_process import SPACE, study

from hpo.config.study_config import StudyConfig, load_study
from hpo.errors import InputError, StudyFileError
from hpo.study.sampling.named_class import REGISTRY, load_class
from hpo.study.sampling.samplers import build_pruner, check_named

pytestmark = pytest.mark.usefixtures("forgotten")

TWO_OBJECTIVES = [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]

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


class Third(BasePruner):
    """Stops a trial from its evaluation number `first` on."""

    def __init__(self, first=3):
        self.first = first

    def prune(self, study, trial):
        return trial.last_step >= self.first
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


def check_own(config: StudyConfig) -> None:
    """Check the sampler and the pruner of a user's own study file."""
    check_named(config, config)


@pytest.mark.usefixtures("package")
def test_a_class_gets_its_options_and_a_seed_for_each_worker() -> None:
    config = study(4, sampler={"name": "acme_search.Lowest", "shift": 1e-5, "seed": 7}, search_space=SPACE)
    tried = ScriptedStudy(config).run(2)
    low = SPACE["learning_rate"]["low"]
    assert [one["learning_rate"] for one in tried] == pytest.approx([low + 1e-5] * 2)
    ScriptedStudy(config, worker_number=3)
    assert sys.modules["acme_search"].SEEDS == [7, 10]
    check_own(config.with_values(objective=study(1, objective=TWO_OBJECTIVES).objective))
    pruner = build_pruner(study(4, pruner={"name": "acme_search.Third", "first": 2}).pruner)
    steps = {1: 0.5, 2: 0.5}
    trial = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING, intermediate_values=steps)
    assert pruner.prune(optuna.create_study(), trial)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("sampler", "Gone", {}, "the module `acme_search` has no `Gone`"),
        ("sampler", "Path", {}, "must be a subclass of optuna's BaseSampler, but it is <class"),
        ("sampler", "Lowest", {"shift": 1e9}, "must propose a value of FloatDistr.* for learn"),
        ("pruner", "Third", {"first": "x"}, "The pruner `acme_search.Third` failed: TypeError"),
    ],
)
def test_an_unusable_class_is_refused_before_the_study_is_made(
    kind: str, name: str, options: dict[str, Any], message: str
) -> None:
    config = study(4, search_space=SPACE, **{kind: {"name": f"acme_search.{name}", **options}})
    with pytest.raises(InputError, match=message):
        check_own(config)


def test_a_class_from_the_database_runs_only_if_it_is_trusted(tmp_path: Path, package: Path) -> None:
    name = "acme_search.Lowest"
    ok(hpo_command(tmp_path, "init", str(write_study(tmp_path))))
    change_definition(tmp_path, sampler={"name": name})
    refused(finish(start_hpo(tmp_path, "worker", "tiny", COLUMNS="200")), f"asks to run the class `{name}`")
    ok(finish(start_hpo(tmp_path, "status", "tiny")))
    assert not Path(f"{package}.ran").exists()
    ok(finish(start_hpo(tmp_path, "worker", "tiny", "--trust-code", name, "--workers", "2")))
    assert stored(tmp_path).counts["done"] == 2


HUB_SAMPLER = """
from optuna.samplers import RandomSampler

__all__ = ["AutoSampler", "other"]
other = 1


class AutoSampler(RandomSampler):
    pass
"""


WITHOUT_SEED = """
class WithoutSeed(RandomSampler):
    def __init__(self):
        super().__init__()
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of OptunaHub's registry with a few packages."""
    pytest.importorskip("optunahub", reason="the package optunahub is not installed")
    for name, source in {
        "auto_sampler": HUB_SAMPLER,
        "two": HUB_SAMPLER + "\n\nclass Second(AutoSampler):\n    pass\n\n\n__all__ += ['Second']\n",
        "without_all": f"{HUB_SAMPLER.partition('__all__')[0]}{WITHOUT_SEED}",
        "broken": "import no_such_dependency\n",
    }.items():
        folder = tmp_path / "registry" / "samplers" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
    monkeypatch.setenv(REGISTRY, str(tmp_path / "registry"))


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("auto_sampler", ""),
        ("without_all", ""),
        ("two@v1:Second", ""),
        ("two", "must name a package with one sampler, but it has AutoSampler, Second"),
        ("broken", "ModuleNotFoundError: No module named 'no_such_dependency'"),
    ],
)
def test_a_sampler_of_optunahub(name: str, message: str) -> None:
    config = study(4, sampler={"name": f"optunahub:samplers/{name}"}, search_space=SPACE)
    with pytest.raises(InputError, match=message) if message else nullcontext():
        check_own(config)
    assert message or len(ScriptedStudy(config).run(2)) == 2


@pytest.mark.usefixtures("hub")
def test_optunahub_loads_the_main_branch_or_the_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, module = [], ModuleType("loaded")
    module.__dict__["Second"] = optuna.samplers.RandomSampler
    monkeypatch.delenv(REGISTRY)
    monkeypatch.setattr("optunahub.load_module", lambda name, ref: asked.append((name, ref)) or module)
    for at in ("", "@v1"):
        load_class(f"optunahub:samplers/two{at}:Second", optuna.samplers.BaseSampler, "sampler")
    assert asked == [("samplers/two", "main"), ("samplers/two", "v1")]


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


def test_a_sampler_and_a_pruner_from_the_studys_own_code(tmp_path: Path) -> None:
    changes = {"data": {"source": "synthetic"}, "objective": {"metric": "score"}}
    path = write(tmp_path, OWN, sampler={"name": "lucky", "share": 0.25}, pruner={"name": "hasty"}, **changes)
    config = load_study(path)
    check_own(config)
    assert build_pruner(config.pruner)
    with pytest.raises(StudyFileError, match=r"sampler\.shre: there is no such key"):
        load_study(write(tmp_path, OWN, sampler={"name": "lucky", "shre": 0.25}, **changes))
    with pytest.raises(InputError, match=r"an instance of optuna's BaseSampler, but got <optuna\.pruners"):
        check_own(load_study(write(tmp_path, OWN, sampler={"name": "wrong"}, **changes)))
