"""Values of numpy, torch and floats outside JSON."""

import json

import numpy as np
import torch

from hpo.json_safe import json_safe


def test_json_safe() -> None:
    given = {"a": np.float32(0.5), "b": [float("nan"), {1}], "c": np.array([1.0, np.inf]), 3: True, "d": None}
    given["e"] = (torch.tensor(2.0), torch.ones(2))
    expected = {"a": 0.5, "b": [None, [1]], "c": [1.0, None], "3": True, "d": None, "e": [2.0, [1.0, 1.0]]}
    assert json_safe(given) == expected
    assert json.loads(json.dumps(json_safe(given), allow_nan=False)) == expected
