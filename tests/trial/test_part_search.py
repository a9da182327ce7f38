"""Trials with parts in fp32, and the search for these parts in models with planted faults."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny import CPU, ENCODER, TRAINING, CompatCache, altered_executor, parts_of, tiny_executor

import hpo
from hpo.errors import Incompatible, ModelError
from hpo.inference import model as inference
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome
from hpo.precision.parts import float32_modules
from hpo.trial.best_model import export_checkpoint, with_scores
from hpo.trial.compat import Compatibility, cache_key
from hpo.trial.executor import Executor
from hpo.trial.measure import Measurement
from hpo.trial.part_search import CheckedSets, FoundParts, find_parts, search
from hpo.trial.parts import build_trial
from hpo.trial.run import checkpoint_key
from hpo.trial.telemetry import Callbacks, StoredTrial

LETTERS = "abcdefgh"


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


def test_every_found_part_is_necessary() -> None:
    """Whatever is good, as long as more parts in fp32 are not worse."""
    draw = random.Random(0)
    for _ in range(200):
        needed = [{*draw.sample(LETTERS, draw.randint(1, 4))} for _ in range(draw.randint(1, 3))]
        checks = Checks(lambda kept, needed=needed: any(one <= kept for one in needed))
        result = checks.search()
        found = {*result.parts}
        assert checks.is_good(found)
        assert not any(checks.is_good(found - {part}) for part in found)
        assert (result.before, result.after, result.reason) == ("incompatible", "ok", "")
        assert len({*checks.sets}) == result.num_checks <= 3 * len(LETTERS) + 1, "each set is checked once"


@pytest.mark.parametrize("bad", ["degraded", "incompatible", "invalid"])
def test_models_without_a_search(bad: str) -> None:
    assert Checks(lambda _: True).search() == FoundParts((), "ok", "ok", 1)
    found = Checks(lambda _: False, bad).search()
    is_searched = bad != "invalid"
    assert (found.parts, found.before, found.after, found.num_checks) == ((), bad, bad, 1 + is_searched)
    said = f"no set of parts helps: with all 8 parts in fp32 the check is {bad} too"
    assert found.reason.startswith(said) if is_searched else found.reason == ""


def test_early_stop_keeps_a_good_set() -> None:
    checks = Checks(lambda kept: kept >= {"b", "g"})
    found = checks.search(max_checks=11)
    assert {*found.parts} > {"b", "g"}
    assert found.reason == "the search stopped after 11 checks, so a part of these may not be needed."


def test_part_is_refined_to_its_modules() -> None:
    inner = {"c": ["c.1", "c.2", "c.3"], "c.2": ["c.2.x", "c.2.y"]}
    checks = Checks(lambda kept: "f" in kept and bool(kept & {"c", "c.2", "c.2.y"}))
    found = search(CheckedSets(checks), LETTERS, lambda part: inner.get(part, ()))
    assert found.parts == ("f", "c.2.y")


def enlarge(name: str) -> Callable[[MultitaskModel], object]:
    """Multiply the weights of a module before a norm: fp32 is unchanged, fp16 overflows."""
    return lambda model: model.get_submodule(name).weight.mul_(1e8)


FIRST, SECOND = (f"encoder.encoder.layer.0.{name}.dense" for name in ("attention.output", "output"))


def executor_of(folder: Path, name: str, parts: Any = "auto", **study: Any) -> Executor:
    training = TRAINING | {"max_steps": 2, "fp_precision": "fp16", "fp32_parts": parts}
    encoder = ENCODER | {"num_hidden_layers": 1}
    return altered_executor(folder, enlarge(name), model={"encoder": encoder}, training=training, **study)


def test_scored_and_exported_models_have_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the logits would not be finite."""
    executor, folder = executor_of(tmp_path, SECOND), tmp_path / "checkpoints"
    result = executor.run({}, folder, "trial")
    assert result.outcome == Outcome.COMPLETE, result.reason
    scored, statistics = with_scores(executor, folder, {}, result, "validation")
    assert (scored.outcome, bool(statistics)) == ("complete", True), scored.reason
    features = frozenset({"avx512_fp16", "avx512_bf16", "amx_bf16", "amx_fp16"})
    monkeypatch.setattr(inference, "probe_device", lambda _: replace(CPU, cpu_features=features))
    exported = export_checkpoint(executor, folder, tmp_path / "export", StoredTrial(0))
    model = hpo.load(exported, device="cpu", precision="fp16")
    assert model.predict(["The rent is too high."])[0]
    for precision, parts in (("fp16", [SECOND]), ("fp32", []), ("fp16", [SECOND]), ("bf16-true", [])):
        model.use("cpu", precision)
        assert [*float32_modules(model.network)] == parts


def test_interrupted_search_continues_from_the_cache(tmp_path: Path) -> None:
    cache = CompatCache()
    cache.killed_at = 5

    def find() -> FoundParts:
        return find_parts(parts_of(executor_of(tmp_path, FIRST)), cache)

    with pytest.raises(KeyboardInterrupt):
        find()
    cache.killed_at = None
    found = find()
    assert found.parts == (FIRST,)
    assert len(cache.stored) == found.num_checks + 1, "the result is kept too"
    cache.killed_at = len(cache.stored)  # nothing may be written any more
    assert find() == found


def test_stopped_trial_leaves_the_search(tmp_path: Path) -> None:
    executor, told = executor_of(tmp_path, FIRST), itertools.count(1)
    executor.cache = CompatCache()
    result = executor.run({}, None, "", Callbacks(should_stop=lambda: next(told) == 4))
    assert (result.outcome, len(executor.cache.stored)) == (Outcome.PREEMPTED, 3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("parts", [["layers.0", "heads.evidence"], ["attention", "norms"]])
def test_record_of_each_part(tmp_path: Path, precision: str, parts: list[str]) -> None:
    training = TRAINING | {"max_steps": 2, "fp_precision": precision, "fp32_parts": parts}
    result = tiny_executor(tmp_path, training=training).run({}, None, "")
    assert result.outcome == Outcome.COMPLETE, result.reason
    assert result.telemetry["precision"]["agrees"]
    record = result.telemetry["fp32_parts"]
    assert [*record["requested"]] == [*record["resolved"]] == parts
    reduced = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    effective = {"norms": None, "others": reduced}  # norms multiply with no matrix
    for part, facts in record["by_part"].items():
        assert facts["effective"] == effective.get(part, "float32")
        assert facts["observed"].keys() == {facts["effective"]} - {None}
    counted = sum(sum(facts["observed"].values()) for facts in record["by_part"].values())
    assert counted == sum(result.telemetry["precision"]["observed"]["linear_products"].values())


def test_comparison_leaves_out_parts_without_fp32_weights(tmp_path: Path) -> None:
    """All precisions get the settings of the compared trial."""
    executor = tiny_executor(tmp_path, training=TRAINING | {"fp32_parts": ["heads"]})
    low, noted = {"fp_precision": "bf16-true"}, dict[str, Any]()
    with pytest.raises(Incompatible, match="`bf16-true` has no weights in fp32"):
        parts_of(executor, **low)
    resolved = replace(executor.resolved, config=executor.study.model_copy(update={"comparison": object()}))
    parts = build_trial(resolved, low, executor.loader, lambda **facts: noted.update(facts))
    assert parts.config.fp32_parts == noted["fp32_parts"]["resolved"] == ()
    assert [*noted["fp32_parts"]["requested"]] == ["heads"]


def test_searched_parts_belong_to_their_encoder(tmp_path: Path) -> None:
    small = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    large = small | {"num_hidden_layers": 3}
    named = [dict(large)]  # YAML would write an alias for the same one

    def check(part: str) -> None:
        parts = {"type": "categorical", "choices": [[part]], "when": {"encoder": named}}
        space = {"encoder": {"type": "categorical", "choices": [small, large]}, "fp32_parts": parts}
        tiny_executor(tmp_path, model={}, search_space=space).check_study()

    check("layers.2")
    with pytest.raises(ModelError, match=r"has no `heads.evidens`. Did you mean `heads.evidence`"):
        check("heads.evidens")


def test_keys_contain_the_parts(tmp_path: Path) -> None:
    executor, named = tiny_executor(tmp_path), ([], ["heads"], ["layers.0"])
    trials = [parts_of(executor, fp_precision="bf16", fp32_parts=names) for names in named]
    assert len({cache_key(parts) for parts in trials}) == 3
    assert len({checkpoint_key("", parts) for parts in trials}) == 3
