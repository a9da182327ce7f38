from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_encoders import BERT, LABEL, make_batch, make_model, scalar_loss

from hpo.training.compilation import CompileClock, apply_compile, compiled_modules


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


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_compile_takes_what_the_scope_says(
    mode: str, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert apply_compile(model, mode, scope, dynamic) is model
        assert compiled_modules(model) == names
        assert asked == [{"mode": mode, "dynamic": dynamic}] * len(names)
        assert list(model.state_dict()) == keys


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["model", "layers"])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_gives_the_same_logits_and_gradients(scope: str) -> None:
    one_layer = {**BERT, "num_hidden_layers": 1}
    plain = make_model(one_layer, dropout=0.0, attention_dropout=0.0, head_dropout=0.0, tasks=(LABEL,))
    compiled = copy.deepcopy(plain)
    apply_compile(compiled, "default", scope)
    for name, logits in plain(*make_batch()).items():
        torch.testing.assert_close(compiled(*make_batch())[name], logits, rtol=1e-5, atol=1e-5)
    scalar_loss(plain).backward()
    scalar_loss(compiled).backward()
    for expected, parameter in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6)
