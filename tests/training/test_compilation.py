from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpo.training.compilation import CompileClock


@pytest.fixture(autouse=True)
def _forget_what_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_only_compilation_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("hpo.training.compilation.time.perf_counter", lambda: now[0])

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
