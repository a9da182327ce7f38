"""The sentences of a comparison beside those of its verdicts (`hpo.evaluation.verdict`).

The terminal, the report and the dashboard show what is made here and stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpo.compare.answer import Answer
from hpo.compare.runs import Ratio, Runs
from hpo.config.choices import MOST_SEEDS
from hpo.config.comparison import REFERENCE
from hpo.evaluation.decision import ALPHA
from hpo.precision.table import PRECISION
from hpo.study.reading.study_record import TrialRecord


def verdict(answer: Answer, runs: Runs) -> str:
    """The verdict on a precision, and the command that may decide it."""
    plan, told = runs.plan, answer.verdict.sentence
    if not answer.pairs:
        either = f"{plan.named(answer.precision)} or {plan.named(REFERENCE)}"
        return (
            f"{told} No pair of runs tells anything: a run of {either} failed, or ran in another precision."
        )
    has_seeds_left = plan.num_seeds[answer.precision] < plan.max_seeds
    if answer.verdict.reason and has_seeds_left:
        return f"{told} More seeds cannot show it."
    if not answer.is_open or has_seeds_left or plan.max_seeds == MOST_SEEDS:
        return told
    more = min(next_look(plan.max_seeds), MOST_SEEDS)
    return f"{told} More seeds may decide: {plan.command} --max-seeds {more}"


def next_look(num: int) -> int:
    """Return the number of seeds of the next look. Any number would do, but each look costs a little."""
    return max(num + 1, num * 3 // 2)


def error(answers: Collection[Answer], runs: Runs) -> str:
    """The stated errors of the verdicts, and what they refer to."""
    num, configurations = len(answers), len(runs.plan.configurations)
    each = f"Each verdict `as good` is wrong in at most {100 * ALPHA:g} % of comparisons, and so is `worse`"
    any_wrong = f"at least one wrong `as good` is said in at most {100 * ALPHA * num:g} %"
    several = f". With {num} precisions, {any_wrong}" if num > 1 else ""
    what = "this configuration" if configurations == 1 else f"these {configurations} configurations"
    return f"{each}{several}. The verdicts are about {what} on new seeds and new rows of this kind."


def collapsed(trial: TrialRecord, configuration: int, score: float | None, runs: Runs) -> str:
    """A run that collapsed, with its seed."""
    precision, seed = runs.plan.named(trial.params[runs.plan.setting]), trial.params["seed"]
    run = f"{precision}, trial {trial.number} (configuration {configuration}, seed {seed})"
    if score is not None:
        return f"{run}: {runs.metric} {score:.2f}, nearer to the baseline than to {REFERENCE}."
    return f"{run}: no score, {trial.outcome}{f': {trial.reason}' if trial.reason else ''}".rstrip(".") + "."


def recommendation(answers: Sequence[Answer], runs: Runs) -> str:
    """The precision to use: as good as fp32, and the fastest, or the one that stores the fewest bytes."""
    plan, fp32 = runs.plan, runs.plan.named(REFERENCE)
    name, text, more, sign = _GAINS[plan.setting == PRECISION]
    good = [answer for answer in answers if answer.name == "as_good"]
    where = f" on {plan.device}" if plan.device else ""
    within = f"{runs.metric} within {plan.margin:g} {answers[0].verdict.unit}"
    ratios = [(answer, ratio) for answer in good if (ratio := answer.ratios[name])]
    gaining = [one for one in ratios if _is_gain(one[1], sign)]
    if gaining:
        answer, ratio = max(gaining, key=lambda one: sign * one[1].ratio)
        return (
            f"Use {plan.named(answer.precision)}: as good as {REFERENCE} ({within}), and "
            f"{text.format(ratio.ratio)} ({ratio.low:.2f} to {ratio.high:.2f}){where}."
        )
    if good:
        names = listed([plan.named(answer.precision) for answer in good], "and")
        are = "is" if len(good) == 1 else "are"
        return f"Use {fp32}: {names} {are} as good ({within}), but not shown to be {more}{where}."
    worse = [plan.named(answer.precision) for answer in answers if answer.name == "worse"]
    if len(worse) == len(answers):
        return f"Use {fp32}: {listed(worse, 'and')} {'is' if len(worse) == 1 else 'are'} worse ({within})."
    rest = listed([plan.named(answer.precision) for answer in answers if answer.name == "not_shown"], "or")
    return f"Use {fp32}: it is not shown whether {rest} is as good ({within}). Reasons: {plan.command}"


def listed(names: Sequence[str], word: str) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_GAINS = {
    True: ("speed_ratio", "{:.2f} times as fast in training", "faster", 1),
    False: ("stored_ratio", "stored in {:.2f} of the bytes", "smaller", -1),
}
"""The gain that decides between precisions that are as good, by whether they are those of computing: the
ratio, how it is told, and 1 if a ratio above 1 gains."""


def _is_gain(ratio: Ratio, sign: int) -> bool:
    """Whether the whole interval shows a gain."""
    return all(end is not None and sign * (end - 1) > 0 for end in (ratio.low, ratio.high))
