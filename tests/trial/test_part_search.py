"""The search for parts in fp32, in described and in real models with planted faults."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import ENCODER, altered_executor

from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome
from hpo.precision.parts import float32_modules
from hpo.trial.compat import Compatibility
from hpo.trial.diagnosis import _parts
from hpo.trial.executor import Executor
from hpo.trial.measure import Measurement
from hpo.trial.part_search import CheckedSets, FoundParts, find_parts, search
from hpo.trial.parts import build_trial
from hpo.trial.telemetry import Callbacks

LETTERS = "abcdefgh"
TRAINING = {"max_steps": 2, "batch_size": 8, "max_length": 64, "dropout": 0.0}


class Checks:
    """A model of eight parts with known good sets."""

    def __init__(self, is_good: Callable[[set[str]], bool], bad: str = "incompatible") -> None:
        self.is_good, self.bad = is_good, bad
        self.sets: list[frozenset[str]] = []

    def __call__(self, parts: Sequence[str]) -> Compatibility:
        assert len(parts) == len({*parts})
        self.sets.append(frozenset(parts))
        verdict = "ok" if self.is_good({*parts}) else self.bad
        return Compatibility(verdict, (f"{verdict}.",), Measurement("fp16", finite=verdict == "ok"))

    def search(self, **options: Any) -> FoundParts:
        return search(CheckedSets(self, **options), LETTERS, lambda _: ())


@pytest.mark.parametrize("num_bad", [1, 2, 3, 8])
def test_necessary_parts_are_found(num_bad: int) -> None:
    for bad in itertools.islice(itertools.combinations(LETTERS, num_bad), 30):
        checks = Checks(lambda kept, bad=bad: kept >= {*bad})
        found = checks.search()
        assert found.parts == bad
        assert (found.before, found.after, found.reason) == ("incompatible", "ok", "")
        assert found.num_checks == len(checks.sets) <= 3 * len(LETTERS) + 1


@pytest.mark.parametrize("pair", ["ab", "ah", "dg"])
def test_one_part_of_a_pair_is_found(pair: str) -> None:
    found = Checks(lambda kept: bool(kept & {*pair})).search()
    assert len(found.parts) == 1
    assert found.parts[0] in pair


def test_every_found_part_is_necessary() -> None:
    """Whatever is good, as long as more parts in fp32 are not worse."""
    draw = random.Random(0)
    for _ in range(200):
        needed = [{*draw.sample(LETTERS, draw.randint(1, 4))} for _ in range(draw.randint(1, 3))]
        checks = Checks(lambda kept, needed=needed: any(one <= kept for one in needed))
        found = {*checks.search().parts}
        assert checks.is_good(found)
        assert not any(checks.is_good(found - {part}) for part in found)
        assert len({*checks.sets}) == len(checks.sets) <= 3 * len(LETTERS) + 1, "each set is checked once"


@pytest.mark.parametrize("bad", ["degraded", "incompatible"])
def test_hopeless_model_costs_two_checks(bad: str) -> None:
    found = Checks(lambda _: False, bad).search()
    assert (found.parts, found.before, found.after, found.num_checks) == ((), bad, bad, 2)
    assert found.reason.startswith(f"no set of parts helps: with all 8 parts in fp32 the check is {bad} too")


def test_sound_or_invalid_model_is_not_searched() -> None:
    assert Checks(lambda _: True).search() == FoundParts((), "ok", "ok", 1)
    assert Checks(lambda _: False, "invalid").search() == FoundParts((), "invalid", "invalid", 1)


def test_early_stop_keeps_a_good_set() -> None:
    checks = Checks(lambda kept: kept >= {"b", "g"})
    found = checks.search(max_checks=11)
    assert {*found.parts} > {"b", "g"}
    assert found.reason == "the search stopped after 11 checks, so a part of these may not be needed."
    assert len(checks.sets) == 11


def test_part_is_refined_to_its_modules() -> None:
    inner = {"c": ["c.1", "c.2", "c.3"], "c.2": ["c.2.x", "c.2.y"]}

    def is_good(kept: set[str]) -> bool:
        return "f" in kept and bool(kept & {"c", "c.2", "c.2.y"})

    checks = Checks(is_good)
    found = search(CheckedSets(checks), LETTERS, lambda part: inner.get(part, ()))
    assert found.parts == ("f", "c.2.y")


def enlarge(*names: str, factor: float = 1e8) -> Callable[[MultitaskModel], None]:
    """Multiply the weights of modules before a norm: fp32 is unchanged, fp16 overflows."""

    def alter(model: MultitaskModel) -> None:
        for name in names:
            model.get_submodule(name).weight.mul_(factor)  # type: ignore[union-attr, operator]

    return alter


FIRST, SECOND = (f"encoder.encoder.layer.0.{name}.dense" for name in ("attention.output", "output"))


def executor_of(
    folder: Path, alter: Callable[[MultitaskModel], object], parts: Any = "auto", **study: Any
) -> Executor:
    training = TRAINING | {"fp_precision": "fp16", "fp32_parts": parts}
    encoder = ENCODER | {"num_hidden_layers": 1}
    return altered_executor(folder, alter, model={"encoder": encoder}, training=training, **study)


def test_only_the_overflowing_module_gets_fp32(tmp_path: Path) -> None:
    plain = executor_of(tmp_path, enlarge(SECOND), []).run({}, None, "")
    assert plain.outcome == Outcome.INCOMPATIBLE
    result = executor_of(tmp_path, enlarge(SECOND)).run({}, None, "")
    assert result.outcome == Outcome.COMPLETE, result.reason
    record = result.telemetry["fp32_parts"]
    assert (record["requested"], [*record["resolved"]]) == ("auto", [SECOND])
    assert (record["verdict_without"], record["verdict"]) == ("incompatible", "ok")
    assert record["by_part"][SECOND] == {"effective": "float32", "observed": {"float32": 1}}
    assert record["by_part"]["others"]["observed"].keys() == {"float16"}
    assert result.telemetry["precision"]["agrees"]
    assert result.telemetry["compatibility"]["verdict"] == "ok"


class Cache:
    """A compatibility cache with a kill at one of its writes."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.killed_at: int | None = None

    def get_compat(self, key: str) -> Any:
        return self.results.get(key)

    def put_compat(self, key: str, result: Any) -> Any:
        if len(self.results) == self.killed_at:
            raise KeyboardInterrupt
        return self.results.setdefault(key, result)


def test_interrupted_search_continues_from_the_cache(tmp_path: Path) -> None:
    cache = Cache()
    cache.killed_at = 5

    def find() -> FoundParts:
        executor = executor_of(tmp_path, enlarge(FIRST))
        return find_parts(build_trial(executor.resolved, {}, executor.loader), cache)

    with pytest.raises(KeyboardInterrupt):
        find()
    cache.killed_at = None
    found = find()
    assert found.parts == (FIRST,)
    assert len(cache.results) == found.num_checks + 1, "the result is kept too"
    cache.killed_at = len(cache.results)  # nothing may be written any more
    assert find() == found


def test_stopped_trial_leaves_the_search(tmp_path: Path) -> None:
    told = itertools.count(1)
    callbacks = Callbacks(should_stop=lambda: next(told) == 4)
    executor = executor_of(tmp_path, enlarge(FIRST))
    executor.cache = Cache()
    result = executor.run({}, None, "", callbacks)
    assert result.outcome == Outcome.PREEMPTED
    assert len(executor.cache.results) == 3


def test_diagnosis_uses_the_found_parts(tmp_path: Path) -> None:
    executor = executor_of(tmp_path, enlarge(FIRST))
    telemetry = {"precision": {"effective": "fp16"}, "fp32_parts": {"resolved": [FIRST]}}
    trial: Any = SimpleNamespace(params={}, telemetry=telemetry)
    assert [*float32_modules(_parts(executor, trial).model)] == [FIRST]
