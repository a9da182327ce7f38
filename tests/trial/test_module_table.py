"""The verdict on real modules, against what plain PyTorch does with them."""

import pytest
from support.module_table import FAMILIES, MODULES, PRECISIONS, checked, plain

CASES = [*MODULES, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_only_what_fails_in_plain_pytorch_is_incompatible(name: str) -> None:
    case = (MODULES | FAMILIES)[name]
    for precision in PRECISIONS:
        check = checked(case, precision)
        assert check.verdict in ("ok", "degraded", "incompatible"), (precision, check)
        if check.verdict == "incompatible":
            assert plain(case, precision) != "works", (precision, check)
