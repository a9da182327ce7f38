"""Each name that a setting takes is known to the code that runs by it, and does what no other name does."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, get_args

import pytest
import torch
from tiny_encoders import make_model

from hpo.config.trial_settings import TrialSettings
from hpo.errors import ModelError
from hpo.training.losses import LOSSES
from hpo.training.optim import build_optimizer, parameter_groups, schedule_factor

# The compiler's modules use `torch.jit.script_method`, which torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def choices(setting: str) -> tuple[str, ...]:
    return get_args(TrialSettings.model_fields[setting].annotation)


def attention(name: str) -> Any:
    if name == "flash" and not (torch.cuda.is_available() and find_spec("flash_attn")):
        with pytest.raises(ModelError, match="flash"):
            make_model(attention=name)
        return name
    return make_model(attention=name).encoder.config._attn_implementation


EFFECTS: dict[str, Callable[[str], Any]] = {
    "pooling": lambda name: repr(make_model(pooling=name).pool).split(" at ")[0],
    "head_type": lambda name: sum(value.numel() for value in make_model(head_type=name).parameters()),
    "attention": attention,
    "optimizer": lambda name: type(build_optimizer(name, parameter_groups(make_model(), learning_rate=1e-3))),
    "schedule": lambda name: schedule_factor(name, 0.25),
    "loss_weighting": lambda name: [key for key, _ in make_model(loss_weighting=name).named_parameters()],
}


@pytest.mark.parametrize("setting", EFFECTS)
def test_every_choice_has_an_effect_of_its_own(setting: str) -> None:
    effects = [EFFECTS[setting](name) for name in choices(setting)]
    assert len(effects) >= 2
    assert all(effect not in effects[:index] for index, effect in enumerate(effects))


def test_every_loss_fits_a_kind_of_task() -> None:
    assert {"auto", *(loss for losses in LOSSES.values() for loss in losses)} == set(choices("loss"))


def test_every_compile_mode_is_one_of_pytorchs() -> None:
    assert set(choices("compile")) - {"none"} <= set(torch._inductor.list_mode_options())
