"""Study files with their own training loop (`@hpo.trial`): the sections that they must leave out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hpo.config.data_config import DataConfig
from hpo.config.study_file import Problem
from hpo.config.trial_settings import OWN_LOOP_SETTINGS
from hpo.extensions import has_own_loop

UNREAD = {
    "data": "it loads its data itself",
    "model": "it builds its model itself",
    "evaluation": "it evaluates where it calls `run.report`",
    "portfolio": "the portfolio has configurations for fine-tuning encoders",
}
"""The sections that a training loop of the study's own code does not read, and the reasons."""


UNMEASURED = ("train_tokens_per_second", "evaluation_examples_per_second")
"""The measured metrics that such a trial does not have."""


def data_or_own_loop(given: Any) -> Any:
    """Return the section `data`, which a study leaves out if it has its own training loop."""
    if given is None and has_own_loop():
        return DataConfig.of_own_loop()
    if given is None:
        raise ValueError("must be given.")
    return given


def own_loop_problems(given: Collection[str], metrics: Collection[str]) -> Iterator[Problem]:
    """Refuse what a training loop of the study's own does not read or measure.

    `given` are the keys of the study file, `metrics` those of its objectives and limits.
    """
    for metric in UNMEASURED:
        if metric in metrics:
            told = (
                f"{metric} is not measured where the study's code has a training loop. Report a number of it."
            )
            yield Problem(("objective" if "constraints" not in given else "constraints",), told)
    for section, why in UNREAD.items():
        if any(key.partition(".")[0] == section for key in given):
            told = f"must be left out: the study's code has a training loop (`@hpo.trial`), and {why}."
            yield Problem((section,), told)


def own_loop_definition(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of such a study without the keys that its training loop does not read."""
    training = {name: dumped["training"][name] for name in (*OWN_LOOP_SETTINGS, "option")}
    return {key: value for key, value in dumped.items() if key not in UNREAD} | {"training": training}
