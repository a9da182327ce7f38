"""What `hpo compare` runs: configurations of another study, each under several precisions and seeds.

A comparison is a study like any other, with workers, leases and a budget, but its trials are planned. A
*block* is one configuration with one seed under every precision that it is compared in: a matched set, whose
trials have the same initial weights, order of data and dropout masks. The seeds are new ones, never those of
the search, so that the luck of its winners does not count.

The points of the plan are a function of this section alone. It grows by looks: after each of them `hpo
compare` raises `num_seeds`, or closes what is decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from hpo.config.search_space import encode
from hpo.config.trial_settings import Positive, PrecisionName
from hpo.precision.table import PRECISION
from hpo.section import Count, Section, Switch, Whole

REFERENCE = "fp32"
"""What every precision is compared with."""
SEED = "seed"
MOST_SEEDS = 200
"""No comparison has more."""
Question = Literal["precisions", "configurations"]


class ComparedConfiguration(Section):
    """A configuration of the study that is compared."""

    trial: Annotated[Whole, Field(ge=0)]
    """The number of its trial there."""
    params: dict[str, Any]
    """Settings as that trial had them, but for precision and seed."""
    precisions: Annotated[tuple[PrecisionName, ...], Field(strict=False)]
    """What it is trained in: under all that are compared in the paired question, else under those of which it
    is among the best configurations."""
    paired: Switch = False
    """Whether the paired question is asked of it."""
    tuned: Annotated[tuple[PrecisionName, ...], Field(strict=False)] = ()
    """The precisions of which it is among the best configurations."""


class Arm(Section):
    """One configuration under one precision; `repeat` of the reference's second set of seeds."""

    configuration: Annotated[Whole, Field(ge=0)]
    """Its place in the list."""
    precision: PrecisionName
    repeat: Switch = False


class ClosedArm(Arm):
    """An arm that gets no further seeds."""

    num_seeds: Count
    """How many it got."""


class ComparisonConfig(Section):
    """The plan of a comparison, made by `hpo compare` and no key of a study file."""

    study: str
    """Whose configurations these are."""
    study_token: str
    """What tells that study from a later one of its name."""
    question: Question = "precisions"
    """Whether each configuration runs under several precisions, or each under its own, as a race."""
    precisions: Annotated[tuple[PrecisionName, ...], Field(strict=False, min_length=1)]
    """What is compared, fp32 among them."""
    configurations: Annotated[tuple[ComparedConfiguration, ...], Field(strict=False, min_length=1)]
    top: Count
    """How many configurations were asked for; there may be fewer."""
    first_seed: Annotated[Whole, Field(ge=0)]
    """The seeds are this and those that follow it."""
    min_seeds: Count
    """Seeds before the first look."""
    num_seeds: Count
    """Seeds of each arm so far."""
    max_seeds: Annotated[Count, Field(le=MOST_SEEDS)]
    """Seeds by which it is planned to be decided."""
    extensions: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """More seeds than those, asked for later, ascending."""
    margin: Positive
    """A smaller loss is none; in points, of `mae` and `rmse` in the units of the labels."""
    closed: Annotated[tuple[ClosedArm, ...], Field(strict=False)] = ()
    """Arms of which enough is known."""

    def points(self) -> list[dict[str, Any]]:
        """The parameters of all trials, in the order in which they are to run."""
        return [self.point(arm, seed) for index in range(self.num_seeds) for arm, seed in self._arms(index)]

    def point(self, arm: Arm, seed: int) -> dict[str, Any]:
        """The parameters of an arm's trial, as Optuna holds them."""
        params = self.configurations[arm.configuration].params
        return {
            **{name: encode(value) for name, value in params.items()},
            PRECISION: arm.precision,
            SEED: seed,
        }

    def block(self, point: dict[str, Any]) -> tuple[Any, ...]:
        """What the trials that are compared with each other have in common."""
        return tuple(value for name, value in point.items() if name != PRECISION)

    def seed(self, configuration: int, index: int, *, repeat: bool = False) -> int:
        """The seed with an index; no two configurations have one in common, but for a race.

        It depends on no number of seeds, so that a comparison may get more of them. With `repeat`, that of
        the reference's other run, which shows what a seed alone does.
        """
        if self.question == "configurations":
            return self.first_seed + index
        return self.first_seed + 2 * (index * len(self.configurations) + configuration) + repeat

    @property
    def last_seed(self) -> int:
        """The highest that any trial may ever have."""
        return self.seed(len(self.configurations) - 1, MOST_SEEDS - 1, repeat=True)

    @property
    def seeds_allowed(self) -> int:
        """How many seeds an arm may get as things stand."""
        return (self.max_seeds, *self.extensions)[-1]

    def _arms(self, index: int) -> Iterator[tuple[Arm, int]]:
        """The arms that have a seed of this index, and that seed.

        Every second block runs in the opposite order: a device that slows down slows no precision alone.
        """
        for arm in self.arms()[:: -1 if index % 2 else 1]:
            if index < self.seeds_of(arm):
                yield arm, self.seed(arm.configuration, index, repeat=arm.repeat)

    def arms(self) -> list[Arm]:
        """All arms, those of a configuration together."""
        return [
            Arm(configuration=number, precision=precision, repeat=repeat)
            for number, configuration in enumerate(self.configurations)
            for precision in configuration.precisions
            for repeat in (False, True)
            if not repeat or (configuration.paired and precision == REFERENCE)
        ]

    def seeds_of(self, arm: Arm) -> int:
        """How many seeds an arm has so far."""
        for closed in self.closed:
            if Arm(**closed.model_dump(exclude={"num_seeds"})) == arm:
                return closed.num_seeds
        return self.num_seeds
