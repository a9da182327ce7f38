"""What a comparison has found, in one sentence and in full, and whether it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hpo.compare.answers import Answer, Answers, Scores, answer
from hpo.compare.by_precision import UnderPrecision, by_precision
from hpo.compare.companion import caught_up, closed, grown
from hpo.compare.estimate import Ratio
from hpo.compare.race import Race, run_race
from hpo.compare.sequential import LOOKS, Plan
from hpo.compare.settings import configurations_json, own_settings
from hpo.config.comparison import MOST_SEEDS, REFERENCE, Arm, ComparisonConfig
from hpo.config.study_config import StudyConfig
from hpo.data.tasks import Task
from hpo.errors import RunError
from hpo.study.study_record import StudyRecord
from hpo.trial.objectives import unit_of

if TYPE_CHECKING:
    from hpo.study.storage import Storage

Found = TypeVar("Found", bound=Answers | Race)


@dataclass(frozen=True)
class Result(Generic[Found]):
    """What a comparison says so far."""

    plan: ComparisonConfig
    found: Found
    recommendation: str
    """The fastest precision that is as good, and under which conditions; or the best configuration."""
    next_plan: ComparisonConfig | None
    """With the seeds of the next look; None when all is decided or the seeds are used up."""
    precisions: tuple[UnderPrecision, ...] = ()
    """What became of the trials of each; none of a race, where each configuration has its own precision."""

    def as_json(self) -> dict[str, Any]:
        return {
            "study": self.plan.study,
            "num_configurations": len(self.plan.configurations),
            "num_seeds": self.plan.num_seeds,
            **self.found.as_json(),
            "precisions": [found.as_json() for found in self.precisions],
            "configurations": configurations_json(self.plan),
            "recommendation": self.recommendation,
            "has_ended": self.next_plan is None,
        }


def look_by_look(
    storage: Storage,
    companion: StudyConfig,
    run_look: Callable[[StudyConfig], StudyRecord],
    judge_look: Callable[[StudyRecord, StudyConfig], Result[Any]],
) -> Iterator[Result[Any]]:
    """Run the trials of a comparison up to its next look, judge, and go on until it is decided.

    Raises RunError where trials of a look that has ended are not there.
    """
    while True:
        companion = caught_up(storage, companion)
        found = judge_look(run_look(companion), companion)
        yield found
        if found.next_plan is None:
            return
        if found.next_plan.num_seeds <= found.plan.num_seeds:
            raise RunError(f"The comparison `{companion.name}` has ended without all of its trials.")
        companion = grown(companion, found.next_plan)


def judge(
    record: StudyRecord, companion: StudyConfig, search: StudyRecord, tasks: Sequence[Task]
) -> Result[Answers] | Result[Race]:
    """What the trials of a comparison say so far.

    Args:
        record: of the comparison, `companion`.
        search: of the study whose configurations these are.
    """
    scores = Scores(record, companion, tasks)
    plan = scores.plan
    decided_by = Plan(
        margin=plan.margin,
        min_seeds=plan.min_seeds,
        max_seeds=plan.max_seeds,
        extensions=plan.extensions,
    )
    if plan.question == "configurations":
        return _judge_race(scores, search, decided_by)
    answers = answer(scores, decided_by)
    open_ = {row.precision for row in _deciding(answers) if not row.verdict.is_final}
    decided = [arm for arm in plan.arms() if arm.precision not in {*open_, REFERENCE}]
    next_look = decided_by.next_look(plan.num_seeds) if open_ else None
    advice = _advice(answers, plan)
    if open_ and next_look is None:
        advice += _more_seeds(answers, plan)
    return Result(plan, answers, advice, _next(plan, decided, next_look), by_precision(scores))


def _judge_race(scores: Scores, search: StudyRecord, decided_by: Plan) -> Result[Race]:
    plan = scores.plan
    arms = {plan.configurations[arm.configuration].trial: arm for arm in plan.arms()}
    new, same_split = (scores.score(scores.objective, on_test=on_test) for on_test in (scores.on_test, False))
    searched = {trial.number: same_split(trial) for trial in search.trials if trial.number in arms}
    race = run_race(
        {number: scores.of_arm(arm, new) for number, arm in arms.items()},
        {number: value for number, value in searched.items() if value is not None},
        decided_by,
        {number: scores.of_arm(arm, same_split) for number, arm in arms.items()},
    )
    beaten = [arm for number, arm in arms.items() if number not in race.running]
    return Result(plan, race, _call(race, plan), _next(plan, beaten, race.next_look))


def _next(plan: ComparisonConfig, arms: Sequence[Arm], num_seeds: int | None) -> ComparisonConfig | None:
    """The plan with so many seeds, but for `arms`."""
    return None if num_seeds is None else closed(plan, arms).model_copy(update={"num_seeds": num_seeds})


def _deciding(answers: Answers) -> list[Answer]:
    return [row for row in answers.rows if row.metric == answers.objective and not row.is_noise_floor]


def _advice(answers: Answers, plan: ComparisonConfig) -> str:
    """A precision is as good when it is so with configurations of its own; where it has none, with those that
    all share. It is faster on a kind of device when the whole interval of its speed there says so.
    """
    by_precision: dict[str, dict[str, Answer]] = {}
    for row in _deciding(answers):
        by_precision.setdefault(row.precision, {})[row.question] = row
    deciding = {name: rows.get("tuned") or rows["paired"] for name, rows in by_precision.items()}
    as_good = [name for name, row in deciding.items() if row.verdict.verdict == "as_good"]
    good = [name for name in as_good if not deciding[name].not_pooled]
    undecided = [name for name, row in deciding.items() if row.verdict.verdict == "undecided"]
    where = f"{answers.objective} within {plan.margin:g} {unit_of(answers.objective)}"
    fastest = {
        device: _fastest({name: deciding[name] for name in good}, device) for device in answers.devices
    }
    winners = dict.fromkeys(found[0] for found in fastest.values() if found)
    if winners:
        sentences = []
        for name in winners:
            speeds = [
                f"{found[1].ratio:.2f} times as fast ({found[1].low:.2f} to {found[1].high:.2f}) on {device}"
                for device, found in fastest.items()
                if found and found[0] == name
            ]
            condition = _condition(by_precision[name], own_settings(plan, name))
            sentences.append(
                f"Use {name}{condition}: as good as {REFERENCE} "
                f"({where}; {_evidence(by_precision[name])}) and {', '.join(speeds)}."
            )
        if others := [device for device, found in fastest.items() if not found]:
            told = "nothing as good is shown to be faster there"
            sentences.append(f"Use {REFERENCE} on {_and(others)}: {told}.")
        return " ".join(sentences)
    untrained = [name for name, row in deciding.items() if row.verdict.reference_fails]
    if untrained:
        told = "; ".join(_only_trained(name, deciding[name]) for name in untrained)
        return f"{REFERENCE} trains less often than {_and(untrained)}: {told}."
    if good:
        told = "; ".join(f"{name} ({_evidence(by_precision[name])})" for name in good)
        devices = _and(answers.devices)
        return f"Use {REFERENCE}: as good ({where}), but not shown to be faster on {devices}: {told}."
    if as_good:
        told = "; ".join(f"of {name} {deciding[name].not_pooled}" for name in as_good)
        return f"Use {REFERENCE}: the kinds of device do not say the same: {told}. Compare on each by itself."
    if undecided:
        told = f"{plan.num_seeds} seeds do not tell whether {_list(undecided)} as good"
        return f"Use {REFERENCE}: {told} ({where})."
    return f"Use {REFERENCE}: no other precision that was compared is as good ({where})."


def _more_seeds(answers: Answers, plan: ComparisonConfig) -> str:
    """What to type where the seeds that were allowed have not decided."""
    undecided = [row for row in _deciding(answers) if row.verdict.verdict == "undecided"]
    never = f"no number of seeds up to {MOST_SEEDS} is likely to decide"
    by_reason: dict[str, list[str]] = {}
    for row in undecided:
        if not row.verdict.seeds_needed:
            why = row.verdict.reason or never
            by_reason.setdefault(why, []).append(f"{row.precision} ({row.question})")
    told = "".join(f" {', '.join(names)}: {why}." for why, names in by_reason.items())
    needed = {row: row.verdict.seeds_needed for row in undecided if row.verdict.seeds_needed}
    if not needed:
        return told
    num, names = max(needed.values()), ", ".join(f"{row.precision} ({row.question})" for row in needed)
    return f"{told} {num} seeds should decide {names}: hpo compare {plan.study} --max-seeds {num}"


def _only_trained(name: str, row: Answer) -> str:
    """What there is to say where the reference has too few scores to compare with."""
    found = row.verdict
    told = f"{found.num_reference_failed} of its trials ended without a score, of {name} {found.num_failed}"
    if found.verdict == "as_good":
        return f"{told}, and {name} is as good where both train, so use {name}"
    return f"{told}. Use {name} where {REFERENCE} does not train; what it loses is not known"


def _fastest(rows: Mapping[str, Answer], device: str) -> tuple[str, Ratio] | None:
    """The fastest of the precisions on a kind of device, if any is shown to be faster than the reference."""
    faster = [
        (name, found.speed)
        for name, row in rows.items()
        for found in row.devices
        if found.device == device and found.speed and found.speed.low and found.speed.low > 1
    ]
    return max(faster, key=lambda one: one[1].ratio, default=None)


def _condition(rows: Mapping[str, Answer], settings: str) -> str:
    paired = rows.get("paired")
    if paired is None or paired.verdict.verdict == "as_good":
        return ""
    told = "lose" if paired.verdict.verdict == "worse" else "may lose"
    with_ = f"{settings}; " if settings else ""
    lost = f"shared ones {told}: {paired.verdict.difference:+.2f}"
    return f", with configurations that were searched in it ({with_}{lost})"


def _evidence(rows: Mapping[str, Answer]) -> str:
    as_good = [
        f"{question} ({num} configuration{'s' * (num > 1)}{' each' * (question == 'tuned')})"
        for question, row in rows.items()
        if row.verdict.verdict == "as_good" and (num := row.num_configurations)
    ]
    return f"{' and '.join(as_good)}, {max(row.verdict.num_seeds for row in rows.values())} new seeds"


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _call(race: Race, plan: ComparisonConfig) -> str:
    best = race.standings[0]
    if race.best is None:
        return f"No configuration has trained on {plan.num_seeds} new seeds."
    if race.too_close:
        names = ", ".join(map(str, race.too_close))
        more = next((num for num in LOOKS if num > plan.num_seeds), None)
        command = f"hpo compare {plan.study} --configurations --max-seeds {more}"
        return (
            f"Too close to call: trials {names} after {best.num_seeds} new seeds. The first is the best with "
            f"a probability of {best.probability_best:.2f}; `hpo best` shows the one of them that "
            "was best in the search." + ("" if more is None else f" More seeds may tell: {command}")
        )
    bias = (
        f"the search overstated it by {best.overstated:+.2f} points "
        f"({best.overstated_low:+.2f} to {best.overstated_high:+.2f})"
    )
    if len(race.standings) == 1:
        return (
            f"Trial {race.best} has {best.mean:.2f} points on {best.num_seeds} new seeds; {bias}. No other "
            "configuration was compared with it."
        )
    return (
        f"Trial {race.best} is the best with a probability of {best.probability_best:.2f} on "
        f"{best.num_seeds} new seeds; {bias}."
    )
