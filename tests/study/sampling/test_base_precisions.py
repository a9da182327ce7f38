"""A worker draws only the base precisions that its installation has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optuna
import pytest
from scripted_study import ScriptedStudy
from tiny import CPU
from worker_process import result, study

from hpo.config.search_space import suggest
from hpo.errors import InputError
from hpo.study.running.run import check_precisions
from hpo.study.running.worker import WorkerOptions, run_worker
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

WITHOUT = replace(CPU, has_bitsandbytes=False)
BASES: dict[str, Any] = {
    "adapter": {"type": "categorical", "choices": ["lora", "dora"]},
    "base_precision": {"type": "categorical", "choices": ["int8", "nf4"]},
}
SPACE: dict[str, Any] = {
    "adapter": {"type": "categorical", "choices": ["none", "lora"]},
    "base_precision": {"type": "categorical", "choices": ["int8", "nf4"], "when": {"adapter": "lora"}},
}
RATES = {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-3, "log": True}}
STEPS = {"weight_decay": {"type": "float", "low": 0.0, "high": 0.2, "step": 0.1}}


def test_a_missing_package_is_the_reason() -> None:
    config = study(4, search_space=SPACE)
    assert check_precisions(config, CPU) == {}
    assert check_precisions(config, WITHOUT) == {
        "base_precision=nf4": "`base_precision: nf4` needs the package bitsandbytes. "
        "To install it, run `make install EXTRAS=adapters` in your clone of hpo."
    }
    fixed = study(4, training={"adapter": "lora", "base_precision": "nf4"}, search_space=RATES)
    with pytest.raises(InputError, match="nf4` needs the package bitsandbytes"):
        check_precisions(fixed, WITHOUT)


@pytest.mark.parametrize("name", ["tpe", "gp", "nsga2", "random", "qmc"])
def test_it_is_not_drawn_where_it_is_lacking(name: str) -> None:
    config = study(30, sampler={"name": name, "seed": 1}, search_space=SPACE | RATES)
    left_out = check_precisions(config, WITHOUT)
    here = ScriptedStudy(config, device=WorkerDevice(left_out=left_out), skipped=left_out)
    drawn = [params.get("base_precision") for params in here.run(24)]
    assert set(drawn) == {None, "int8"}
    assert {trial.params.get("base_precision") for trial in here.trials} == {None, "int8"}
    every = optuna.distributions.CategoricalDistribution(("int8", "nf4"))
    assert {t.distributions.get("base_precision", every) for t in here.trials} == {every}, (
        "as the study has it"
    )


@pytest.mark.parametrize("name", ["tpe", "gp", "nsga2", "random", "qmc"])
def test_where_none_is_there_the_trials_without_are_run(name: str) -> None:
    nf4 = {"type": "categorical", "choices": ["nf4"], "when": {"adapter": ["lora"]}}
    space = SPACE | RATES | {"base_precision": nf4}
    config = study(30, sampler={"name": name, "seed": 1}, search_space=space)
    left_out = check_precisions(config, WITHOUT)
    here = ScriptedStudy(config, device=WorkerDevice(left_out=left_out), skipped=left_out)
    there = ScriptedStudy(config, device=WorkerDevice(left_out={}), storage=here.study._storage)
    drawn = [one.run()[0]["adapter"] for _ in range(12) for one in (here, there)]
    assert set(drawn[::2]) == {"none"}
    assert set(drawn[1::2]) == {"none", "lora"}
    always = study(4, search_space=space | {"adapter": {"type": "categorical", "choices": ["lora"]}})
    with pytest.raises(InputError, match="nf4` needs the package"):
        check_precisions(always, WITHOUT)


def test_a_grid_leaves_its_points_to_others(storage: Storage) -> None:
    space = {"base_precision": {"type": "categorical", "choices": ["int8", "nf4"]}, **STEPS}
    grid = {"sampler": {"name": "grid", "seed": 1}, "training": {"adapter": "lora"}}
    config = study(6, search_space=space, **grid)
    create_or_resume_study(storage, config)
    for info, ended, bases in ((WITHOUT, "elsewhere", {"int8"}), (CPU, "finished", {"nf4"})):
        drawn: list[Any] = []

        def execute(trial: optuna.trial.Trial, _: Any, drawn: list[Any] = drawn) -> Any:
            drawn.append(suggest(config.search_space, trial)["base_precision"])
            return result("complete")

        device = WorkerDevice("cpu", left_out=check_precisions(config, info))
        assert (
            run_worker(config, storage, execute, WorkerOptions(poll_seconds=0.01), device=device).ended
            == ended
        )
        assert (len(drawn), set(drawn)) == (3, bases)


@pytest.mark.parametrize("lacks", ["base_precision", "fp_precision"])
def test_the_unsupported_choice_is_blamed(lacks: str) -> None:
    """Where all are drawn, as under `on_unsupported: prune`, the other is not avoided for it."""
    precision = {"fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]}}
    config = study(30, sampler={"name": "tpe", "seed": 1}, search_space={**precision, **BASES, **RATES})
    here = ScriptedStudy(config, lambda _: "unsupported")
    facts = {"base_precision": {"requested": "nf4", "effective": None}} if lacks == "base_precision" else {}
    here.study.enqueue_trial({"fp_precision": "bf16", "base_precision": "nf4", "learning_rate": 1e-4})
    trial, _ = here.ask()
    here.end(trial, "unsupported", telemetry=facts)
    here.script = lambda params: params["learning_rate"]
    avoided = {"base_precision": "nf4", "fp_precision": "bf16"}
    drawn = here.run(12)
    assert avoided[lacks] not in {params[lacks] for params in drawn}
    (other,) = avoided.keys() - {lacks}
    assert avoided[other] in {params[other] for params in drawn}
