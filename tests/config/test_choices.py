from collections.abc import Collection
from typing import get_args

import pytest

from hpo.config.trial_settings import TrialSettings
from hpo.models.encoder import ATTENTION_IMPLEMENTATIONS
from hpo.models.multitask import _POOLINGS
from hpo.tasks.kind import KINDS
from hpo.training.optim import OPTIMIZERS, SCHEDULES


def choices(setting: str) -> set[str]:
    return set(get_args(TrialSettings.model_fields[setting].annotation))


@pytest.mark.parametrize(
    ("setting", "known"),
    [
        ("pooling", {*_POOLINGS, "attention"}),
        ("attention", ATTENTION_IMPLEMENTATIONS),
        ("optimizer", OPTIMIZERS),
        ("schedule", SCHEDULES),
        ("loss", {"auto", *(loss for kind in KINDS.values() for loss in kind.losses)}),
    ],
)
def test_choices_of_setting_are_implemented(setting: str, known: Collection[str]) -> None:
    assert choices(setting) == set(known)
