from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiny import TASKS, tiny_batch, tiny_model, tiny_objective
from support.tiny_encoders import make_batch, make_model

from hpo.training.clock import CompileClock
from hpo.training.compilation import RECOMPILE_LIMIT, apply_compile, compiled_modules


@pytest.fixture(autouse=True)
def _forget_what_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_only_compilation_is_counted(now: list[float]) -> None:
    def compiler(graph: Any, _inputs: Any) -> Any:
        now[0] += 5.0

        def run(*args: Any) -> Any:
            now[0] += 0.25
            return graph(*args)

        return run

    clock = CompileClock()
    double = torch.compile(lambda x: x * 2, backend=compiler, dynamic=False)
    double(torch.ones(3))
    assert clock.seconds == 0.0, "not started yet"
    clock.start()
    double(torch.ones(3))
    assert clock.seconds == 0.0, "compiled before"
    for _ in range(3):
        torch.testing.assert_close(double(torch.ones(4)), torch.full((4,), 2.0))
        assert clock.seconds == 5.0
    torch._dynamo.reset()
    double(torch.ones(5))
    assert clock.seconds == 5.0, "a reset ends it"


def test_every_trial_compiles_under_the_same_limit_and_without_earlier_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, list[str]]] = []
    events: list[str] = []

    def fake_compile(function: Any, **_: Any) -> Any:
        def compiled(*inputs: Any) -> Any:
            seen.append((torch._dynamo.config.recompile_limit, list(events)))
            events.append("graph")
            return function(*inputs)

        return compiled

    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    monkeypatch.setattr(torch._dynamo, "reset", events.clear)
    monkeypatch.setattr(torch, "compile", fake_compile)
    for _ in range(2):
        apply_compile(make_model(), "default")(*make_batch())
    assert seen == [(RECOMPILE_LIMIT, [])] * 2


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compile_takes_what_the_scope_says(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def fake_compile(function: Any, **options: Any) -> Any:
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", fake_compile)
    layers = ["encoder.encoder.layer.0", "encoder.encoder.layer.1"]
    for scope, names in (("model", [""]), ("layers", layers)):
        asked.clear()
        model = make_model()
        keys = list(model.state_dict())
        assert compiled_modules(model) == []
        assert apply_compile(model, mode, scope) is model
        assert compiled_modules(model) == names
        assert asked == [{"mode": mode}] * len(names)
        assert list(model.state_dict()) == keys


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_gives_the_same_logits_and_gradients() -> None:
    plain, batch, loss_fn = tiny_model(tasks=TASKS[:1]), tiny_batch(), tiny_objective(TASKS[:1])
    compiled = apply_compile(copy.deepcopy(plain), "default")
    ours, theirs = compiled(*batch.inputs), plain(*batch.inputs)
    for name, logits in theirs.items():
        torch.testing.assert_close(ours[name], logits, rtol=1e-5, atol=1e-5)
    for found in (ours, theirs):
        loss_fn(found, batch, loss_fn.count(batch)).backward()
    for expected, parameter in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6)
