"""Compiled modules and the clock of compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiny_encoders import make_model

from hpo.training.compilation import RECOMPILE_LIMIT, apply_compile, compiled_modules
from hpo.training.throughput import CompileClock


@pytest.fixture(autouse=True)
def _forget_what_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_clock_counts_only_compilation(now: list[float]) -> None:
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


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compiled_modules_of_a_scope(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert torch._dynamo.config.recompile_limit == RECOMPILE_LIMIT
        assert compiled_modules(model) == names
        assert asked == [{"mode": mode}] * len(names)
        assert list(model.state_dict()) == keys
