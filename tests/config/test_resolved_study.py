from typing import Any

import pytest
from support.tiny import CPU
from support.worker_process import study

from hpo.config.resolved_study import resolve_study


@pytest.mark.parametrize(
    ("changes", "precisions"),
    [
        ({"search_space": {}}, ("fp32",)),
        ({"search_space": {}, "amp": {"preset": "ultra"}}, ("bf16",)),
        ({"search_space": {}, "training": {"fp_precision": "fp16"}, "amp": {"preset": "ultra"}}, ("fp16",)),
        ({"amp": {"preset": "ultra"}}, ("fp32", "bf16", "fp16")),
    ],
)
def test_preset_decides_open_precision(changes: dict[str, Any], precisions: tuple[str, ...]) -> None:
    """The described CPU supports only fp32 natively, which is the choice of the preset `auto`."""
    assert resolve_study(study(**changes), CPU).precisions == precisions
