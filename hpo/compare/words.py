"""What a comparison says, in sentences: the only place for them. The terminal, the report and the dashboard
show what is made here and stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.compare.answer import Answer
from hpo.compare.decision import collapse_share, next_look
from hpo.compare.runs import Ratio, Runs
from hpo.config.comparison import MOST_SEEDS, REFERENCE
from hpo.precision.table import PRECISION
from hpo.study.reading.study_record import TrialRecord, is_number


def verdict(answer: Answer, runs: Runs) -> str:
    """The verdict on a precision, its numbers, and what they leave open."""
    name = runs.plan.named(answer.precision)
    head = {"as_good": f"{name} is as good as {REFERENCE}", "worse": f"{name} is worse than {REFERENCE}"}
    told = f"{head.get(answer.verdict, f'{name} is not decided')}"
    if not answer.num_runs:
        return f"{told}: {answer.reason}."
    if is_number(answer.difference):
        told += f": {answer.difference:+.2f} {runs.unit} of {runs.metric}"
        told += f" [{answer.low:+.2f}, {answer.high:+.2f}]" if is_number(answer.low) else ""
    told += f", margin {runs.plan.margin:g}; {_evidence(answer, runs)}."
    if answer.verdict == "as_good":
        return f"{told} It holds if {conditions(answer, runs)}."
    told += f" {unseen(answer.num_runs, answer.num_collapsed)}."
    return f"{told}{_what_would_decide(answer, runs)}" if answer.verdict == "undecided" else told


def _evidence(answer: Answer, runs: Runs) -> str:
    num = len(runs.plan.configurations)
    of = f"{num} configuration{'s' * (num > 1)}"
    return f"{answer.num_runs} runs of {of}, {answer.num_rows:,} rows of {runs.split}"


def _within(runs: Runs) -> str:
    return f"{runs.metric} within {runs.plan.margin:g} {runs.unit}"


def unseen(num_runs: int, num_collapsed: int) -> str:
    share = 100 * collapse_share(num_runs, num_collapsed)
    if num_collapsed:
        return f"{num_collapsed} of {num_runs} runs collapsed, and up to {share:.0f} % may"
    return f"A collapse in up to {share:.0f} % of the runs would not have been seen"


def conditions(answer: Answer, runs: Runs) -> str:
    """What `as good` rests on beside the interval."""
    share = 100 * answer.collapse_share
    seen = f"{answer.num_collapsed or 'none'} of these {answer.num_runs} did, which shows no more"
    rows = f"new texts are like the {answer.num_rows:,} of {runs.split}"
    if runs.unit != "points":
        rows += ", with none that loses far more than all of these"
    return f"no more than {share:.0f} % of the runs collapse ({seen}), and {rows}"


def _what_would_decide(answer: Answer, runs: Runs) -> str:
    if answer.reason:
        return f" Not decided, since {answer.reason}."
    plan = runs.plan
    if plan.num_seeds[answer.precision] < plan.max_seeds or plan.max_seeds == MOST_SEEDS:
        return ""
    more = min(next_look(plan.max_seeds), MOST_SEEDS)
    return f" More seeds may decide: {plan.command} --max-seeds {more}"


def collapsed(trial: TrialRecord, configuration: int, difference: float | None, runs: Runs) -> str:
    precision, seed = runs.plan.named(trial.params[runs.plan.setting]), trial.params["seed"]
    run = f"{precision}, trial {trial.number} (configuration {configuration}, seed {seed})"
    if difference is not None:
        return f"{run}: {-difference:.2f} {runs.unit} below its twin."
    return f"{run}: no score, {trial.outcome}{f': {trial.reason}' if trial.reason else ''}".rstrip(".") + "."


def recommendation(answers: Sequence[Answer], runs: Runs) -> str:
    """The precision to use: as good as fp32, and the fastest, or of what is stored the smallest."""
    plan, fp32 = runs.plan, runs.plan.named(REFERENCE)
    gain = FASTER if plan.setting == PRECISION else SMALLER
    good = [answer for answer in answers if answer.verdict == "as_good"]
    where = f" on {plan.device}" if plan.device else ""
    if best := gain.best(good):
        answer, ratio = best
        return (
            f"Use {plan.named(answer.precision)}: as good as {REFERENCE} ({_within(runs)}, {answer.num_runs} "
            f"runs) if {conditions(answer, runs)}; {gain.text.format(ratio.ratio)} ({ratio.low:.2f} to "
            f"{ratio.high:.2f}){where}."
        )
    if good:
        names = " and ".join(plan.named(answer.precision) for answer in good)
        return f"Use {fp32}: as good ({_within(runs)}), but not shown to be {gain.more}{where}: {names}."
    first, name = answers[0], plan.named(answers[0].precision)
    if not first.num_runs:
        return f"{name} is not decided: {first.reason}."
    if first.verdict == "worse":
        return f"Use {fp32}: {name} is worse ({_within(runs)})."
    return (
        f"Use {fp32}: {first.num_runs} runs do not tell whether {name} is as good "
        f"({_within(runs)}).{_what_would_decide(first, runs)}"
    )


@dataclass(frozen=True)
class Gain:
    """The advantage for which one of several precisions is chosen that are as good."""

    ratio: str
    """Of `RATIOS`."""
    text: str
    more: str
    sign: int
    """+1: a ratio above 1 gains."""

    def best(self, good: Sequence[Answer]) -> tuple[Answer, Ratio] | None:
        """The precision that gains most, of those whose whole interval shows a gain."""
        ratios = [(answer, ratio) for answer in good if (ratio := answer.ratios[self.ratio])]
        gaining = [one for one in ratios if self._is_gain(one[1])]
        return max(gaining, key=lambda one: self.sign * one[1].ratio, default=None)

    def _is_gain(self, ratio: Ratio) -> bool:
        ends = (ratio.low, ratio.high)
        return all(end is not None and self.sign * (end - 1) > 0 for end in ends)


FASTER = Gain("speed_ratio", "{:.2f} times as fast", "faster", 1)
SMALLER = Gain("stored_ratio", "stored in {:.2f} of the bytes", "smaller", -1)
