"""The plan of `hpo compare`: configurations of another study, each with several precisions and seeds.

A comparison varies one `setting`: the precision of training (`fp_precision`), of the weights under an adapter
(`base_precision`) or of the optimiser's moments (`optimizer_state`). The question `configurations` compares
no precisions: each configuration trains in its own `fp_precision`.

The comparison is a study with planned trials. A *block* is one configuration with one seed under every
precision. Its trials have the same initial weights, order of data and dropout masks. The seeds differ from
those of the search, so that the luck of its winners does not count. The points depend on this section alone.
`hpo compare` raises `num_seeds` of the precisions without a verdict.
"""

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
"""The precision to compare with."""
SEED = "seed"
SETTINGS: Mapping[Question, str] = {
    "precisions": PRECISION,
    "base_precision": BASE_PRECISION,
    "optimizer_state": OPTIMIZER_STATE,
    "configurations": PRECISION,
}
"""The varied setting, by question."""
VALUES: Mapping[str, tuple[str, ...]] = {
    PRECISION: PRECISION_NAMES,
    BASE_PRECISION: get_args(TrialSettings.model_fields[BASE_PRECISION].annotation),
    OPTIMIZER_STATE: get_args(TrialSettings.model_fields[OPTIMIZER_STATE].annotation),
}
"""The values of each setting."""
Arm = tuple[int, str]
"""Index of a configuration, and a precision."""


def question_of(setting: str) -> Question:
    return next(question for question, compared in SETTINGS.items() if compared == setting)


def checked_precision(setting: str, name: str) -> str:
    """Return the canonical name of a precision. Raises ValueError for an unknown name."""
    if setting == PRECISION:
        return canonical_precision(name)
    if name in VALUES[setting]:
        return name
    raise ValueError(f"{setting} must be one of {', '.join(VALUES[setting])}, but got `{name}`.")


class ComparedConfiguration(Section):
    """A configuration of the compared study."""

    trial: Annotated[Whole, Field(ge=0)]
    """Number of its trial in the study."""
    params: dict[str, Any]
    """Settings of this trial, except for the compared setting and the seed."""
    precision: str = ""
    """Its only precision. Empty: all compared precisions."""


class ComparisonConfig(Section):
    """The plan of a comparison by `hpo compare`. Not a key of a study file."""

    study: str
    """The study with the configurations."""
    study_token: str
    """Token of the study, to tell it from a later study of the same name."""
    question: Question = "precisions"
    """The varied setting, see `SETTINGS`. `configurations`: no precision is compared."""
    precisions: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Compared precisions, fp32 first."""
    configurations: Annotated[tuple[ComparedConfiguration, ...], Field(strict=False, min_length=1)]
    top: Count
    """Requested number of configurations. There may be fewer."""
    first_seed: Annotated[Whole, Field(ge=0)]
    """Smallest seed."""
    seeds: Count
    """Seeds of each configuration before the first verdict."""
    max_seeds: Annotated[Count, Field(le=MOST_SEEDS)]
    """Largest number of seeds."""
    num_seeds: dict[str, Count]
    """Present number of seeds, by precision."""
    margin: Positive
    """Losses below this are ignored. In points; for `mae` and `rmse` in units of the labels."""
    test_seen: str = ""
    """How test scores were seen before the configurations were selected. Empty: they were not seen."""
    device: str = ""
    """Device of all trials (`DeviceInfo.kind`), the one of the first trial. Empty: any."""

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
        """Return the precisions that a device must support, by setting."""
        points = [self.point(arm, 0) for arm in self.arms()]
        return {
            name: list(dict.fromkeys(point[name] for point in points))
            for name in (PRECISION, BASE_PRECISION)
            if name in points[0]
        }

    def lacking(self, device: str, left_out: Container[str]) -> tuple[str, ...]:
        """Return the needs of the trials that a `device` without the `left_out` choices does not meet.

        Such a device runs no trial, because both trials of a pair run on one kind of device.
        """
        other = [f"the name {self.device}"] if device and self.device not in ("", device) else []
        names = [choice_name(setting, value) for setting, of in self.needs().items() for value in of]
        return (*(name for name in names if name in left_out), *other)

    def points(self) -> list[dict[str, Any]]:
        """Return the parameters of all trials, in order."""
        return [
            self.point(arm, index)
            for index in range(max(self.num_seeds.values()))
            for arm in self._arms_with_seed(index)
        ]

    def point(self, arm: Arm, index: int) -> dict[str, Any]:
        """Return the parameters of an arm's trial with the seed of this index, as Optuna stores them."""
        configuration, precision = arm
        params = self.configurations[configuration].params
        return {
            **{name: encode(value) for name, value in params.items()},
            self.setting: precision,
            SEED: self.seed(configuration, index),
        }

    def seed(self, configuration: int, index: int) -> int:
        """Return the seed of an index. Each configuration has its own seeds.

        A seed does not depend on the number of seeds, so that the number can grow.
        """
        return self.first_seed + index * len(self.configurations) + configuration

    @property
    def last_seed(self) -> int:
        return self.seed(len(self.configurations) - 1, MOST_SEEDS - 1)

    def _arms_with_seed(self, index: int) -> Iterator[Arm]:
        """Yield the arms with this seed. Every second block is reversed, so that a slowing device is fair."""
        for arm in self.arms()[:: -1 if index % 2 else 1]:
            if index < self.num_seeds.get(arm[1], 0):
                yield arm

    def arms(self) -> list[Arm]:
        return [
            (index, name)
            for index, one in enumerate(self.configurations)
            for name in ((one.precision,) if one.precision else self.precisions)
        ]
