"""Compiled modules and the clock of compilation."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.tiny import CPU
from support.tiny_encoders import make_model

from hpo.precision.effective import compiled_modules
from hpo.training.compilation import RECOMPILE_LIMIT, apply_compile, drop_compiled
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
    clock.start()
    double(torch.ones(3))
    assert clock.seconds == 0.0, "compiled before it started"
    for _ in range(3):
        double(torch.ones(4))
        assert clock.seconds == 5.0
    torch._dynamo.reset()
    double(torch.ones(5))
    assert clock.seconds == 5.0, "a reset ends it"


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compiled_modules_of_a_scope(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._dynamo.config.patch(recompile_limit=5):
        layers = ["encoder.encoder.layer.0", "encoder.encoder.layer.1"]
        for scope, names in (("model", [""]), ("layers", layers)):
            compile_ = Mock(side_effect=lambda function, **_: function)
            monkeypatch.setattr(torch, "compile", compile_)
            model = make_model()
            keys = list(model.state_dict())
            assert apply_compile(model, mode, scope) is model
            assert torch._dynamo.config.recompile_limit == RECOMPILE_LIMIT
            assert compiled_modules(model) == names
            assert [call.kwargs for call in compile_.call_args_list] == [{"mode": mode}] * len(names)
            assert list(model.state_dict()) == keys
        drop_compiled(CPU)
        assert torch._dynamo.config.recompile_limit == 5
        drop_compiled(CPU)
        assert torch._dynamo.config.recompile_limit == 5
