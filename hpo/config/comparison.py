"""The plan of `hpo compare`: configurations of another study, each under several precisions and seeds.

A comparison is of one `setting`: the precision of training (`fp_precision`), of the weights under an adapter
(`base_precision`) or of the optimiser's moments (`optimizer_state`). The question `configurations` compares
no precisions: it trains each configuration in its own `fp_precision` alone.

It is a study whose trials are planned. A *block* is one configuration with one seed under every precision;
its trials have the same initial weights, order of data and dropout masks. The seeds are never those of the
search, so that the luck of its winners does not count. The points are a function of this section alone. `hpo
compare` raises `num_seeds` of the precisions that have no verdict yet.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import Field

from hpo.config.choices import CONFIGURATIONS, MOST_SEEDS, Question
from hpo.config.search_space import encode
from hpo.config.trial_settings import Positive, TrialSettings
from hpo.precision.table import (
    BASE_PRECISION,
    OPTIMIZER_STATE,
    PRECISION,
    PRECISION_NAMES,
    canonical_precision,
    choice_name,
)
from hpo.section import Count, Section, Whole

REFERENCE = "fp32"
"""What every precision is compared with."""
SEED = "seed"
SETTINGS: Mapping[Question, str] = {
    "precisions": PRECISION,
    "base_precision": BASE_PRECISION,
    "optimizer_state": OPTIMIZER_STATE,
    "configurations": PRECISION,
}
"""What the arms of a comparison differ in."""
VALUES: Mapping[str, tuple[str, ...]] = {
    PRECISION: PRECISION_NAMES,
    BASE_PRECISION: get_args(TrialSettings.model_fields[BASE_PRECISION].annotation),
    OPTIMIZER_STATE: get_args(TrialSettings.model_fields[OPTIMIZER_STATE].annotation),
}
"""The values of each setting."""
Arm = tuple[int, str]
"""A configuration, by its place in the list, and a precision."""


def question_of(setting: str) -> Question:
    return next(question for question, compared in SETTINGS.items() if compared == setting)


def checked_precision(setting: str, name: str) -> str:
    """A value of a precision by its canonical name. Raises ValueError where there is none of that name."""
    if setting == PRECISION:
        return canonical_precision(name)
    if name in VALUES[setting]:
        return name
    raise ValueError(f"{setting} must be one of {', '.join(VALUES[setting])}, but got `{name}`.")


class ComparedConfiguration(Section):
    """A configuration of the study that is compared."""

    trial: Annotated[Whole, Field(ge=0)]
    """The number of its trial there."""
    params: dict[str, Any]
    """Settings as that trial had them, but for what is compared and the seed."""
    precision: str = ""
    """The only precision that it is trained in. Empty: all that are compared."""


class ComparisonConfig(Section):
    """The plan of a comparison, made by `hpo compare` and no key of a study file."""

    study: str
    """Whose configurations these are."""
    study_token: str
    """What tells that study from a later one of its name."""
    question: Question = "precisions"
    """What the precisions are of: training, the weights under an adapter, or the moments. `configurations`:
    no precision is compared."""
    precisions: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """The compared precisions, fp32 first."""
    configurations: Annotated[tuple[ComparedConfiguration, ...], Field(strict=False, min_length=1)]
    top: Count
    """How many configurations were asked for; there may be fewer."""
    first_seed: Annotated[Whole, Field(ge=0)]
    """The seeds are this and those that follow it."""
    seeds: Count
    """Seeds of each configuration before the first look."""
    max_seeds: Annotated[Count, Field(le=MOST_SEEDS)]
    """No more are added."""
    num_seeds: dict[str, Count]
    """Seeds so far, of each precision."""
    margin: Positive
    """A smaller loss does not count. In points, for `mae` and `rmse` in the units of the labels."""
    test_seen: str = ""
    """How scores on test were seen before the configurations were selected. Empty: they were not."""
    device: str = ""
    """What all its trials run on, as `DeviceInfo.kind`: that on which it was begun. Empty: any."""

    @property
    def setting(self) -> str:
        return SETTINGS[self.question]

    @property
    def command(self) -> str:
        over = f" --over {self.setting}" if self.setting != PRECISION else ""
        over = " --configurations" if self.question == CONFIGURATIONS else over
        return f"hpo compare {self.study}{over}"

    def named(self, precision: str) -> str:
        return precision if self.setting == PRECISION else f"{self.setting} {precision}"

    def needs(self) -> dict[str, list[str]]:
        """What the trials need of a device: values by their setting."""
        points = [self.point(arm, 0) for arm in self.arms()]
        return {
            name: list(dict.fromkeys(point[name] for point in points))
            for name in (PRECISION, BASE_PRECISION)
            if name in points[0]
        }

    def lacking(self, device: str, left_out: Container[str]) -> tuple[str, ...]:
        """What a `device` that leaves out these choices lacks to run the trials; empty: nothing.

        One that lacks anything runs none of them, since both sides of a pair run on one kind of device.
        """
        other = [f"the name {self.device}"] if device and self.device not in ("", device) else []
        names = [choice_name(setting, value) for setting, of in self.needs().items() for value in of]
        return (*(name for name in names if name in left_out), *other)

    def points(self) -> list[dict[str, Any]]:
        """The parameters of all trials, in the order in which they are to run."""
        return [
            self.point(arm, index)
            for index in range(max(self.num_seeds.values()))
            for arm in self._arms_with_seed(index)
        ]

    def point(self, arm: Arm, index: int) -> dict[str, Any]:
        """The parameters of an arm's trial with the seed of this index, as Optuna holds them."""
        configuration, precision = arm
        params = self.configurations[configuration].params
        return {
            **{name: encode(value) for name, value in params.items()},
            self.setting: precision,
            SEED: self.seed(configuration, index),
        }

    def seed(self, configuration: int, index: int) -> int:
        """The seed with an index; no two configurations have one in common.

        It depends on no number of seeds, so that a comparison may get more of them.
        """
        return self.first_seed + index * len(self.configurations) + configuration

    @property
    def last_seed(self) -> int:
        return self.seed(len(self.configurations) - 1, MOST_SEEDS - 1)

    def _arms_with_seed(self, index: int) -> Iterator[Arm]:
        """Every second block runs in the opposite order: a device that slows down slows no arm alone."""
        for arm in self.arms()[:: -1 if index % 2 else 1]:
            if index < self.num_seeds.get(arm[1], 0):
                yield arm

    def arms(self) -> list[Arm]:
        return [
            (place, name)
            for place, one in enumerate(self.configurations)
            for name in ((one.precision,) if one.precision else self.precisions)
        ]
