"""Sentences of a comparison, in addition to its verdicts (`hpo.evaluation.verdict`).

They are stored, and shown in the terminal, the report and the dashboard.
"""

from collections.abc import Mapping, Sequence

from hpo.compare.runs import Ratio, Runs
from hpo.config.choices import MOST_SEEDS
from hpo.config.comparison import REFERENCE
from hpo.evaluation.decision import ALPHA
from hpo.evaluation.verdict import Verdict
from hpo.precision.table import PRECISION
from hpo.study.reading.study_record import TrialRecord


def verdict(found: Verdict, precision: str, runs: Runs) -> str:
    """Return the verdict on a precision, and the command for more seeds."""
    plan, text = runs.plan, found.sentence
    if not found.num_runs:
        either = f"{plan.named(precision)} or {plan.named(REFERENCE)}"
        return f"{text} No pair of runs counts: a run of {either} failed, or ran in another precision."
    has_seeds_left = plan.num_seeds[precision] < plan.max_seeds
    if found.reason:
        return f"{text} More seeds cannot show it." if has_seeds_left else text
    if found.verdict != "not_shown" or has_seeds_left or plan.max_seeds == MOST_SEEDS:
        return text
    more = min(next_num_seeds(plan.max_seeds), MOST_SEEDS)
    return f"{text} More seeds may decide: {plan.command} --max-seeds {more}"


def next_num_seeds(num: int) -> int:
    """Return the number of seeds of the next round. Any number would do, but each round costs a little."""
    return max(num + 1, num * 3 // 2)


def stated_error(num_precisions: int, runs: Runs) -> str:
    """State the error rate of the verdicts, and their scope."""
    num, limit = len(runs.plan.configurations), 100 * ALPHA
    text = f"Each verdict `as good` is wrong in at most {limit:g}% of comparisons, and so is `worse`"
    if num_precisions > 1:
        text += f"; any of {num_precisions} `as good` in at most {limit * num_precisions:g}%"
    scope = "this configuration" if num == 1 else f"these {num} configurations"
    return (
        f"{text}, where its condition on large losses of runs holds. The verdicts are about {scope} on new "
        "seeds and new rows of this kind."
    )


def collapse(trial: TrialRecord, configuration: int, score: float | None, runs: Runs) -> str:
    """Describe a collapsed run."""
    precision, seed = runs.plan.named(trial.params[runs.plan.setting]), trial.params["seed"]
    run = f"{precision}, trial {trial.number} (configuration {configuration}, seed {seed})"
    if score is not None:
        return f"{run}: {runs.metric} {score:.2f}, nearer to the baseline than to its {REFERENCE}."
    return f"{run}: no score, {trial.outcome}{f': {trial.reason}' if trial.reason else ''}".rstrip(".") + "."


def recommendation(evidence: Mapping[str, tuple[Verdict, Mapping[str, Ratio | None]]], runs: Runs) -> str:
    """Recommend a precision as good as fp32: the fastest, or the one with the fewest stored bytes.

    Precisions of computing are chosen by speed, others by their size.
    """
    plan, is_speed = runs.plan, runs.plan.setting == PRECISION
    names = {
        verdict: [plan.named(precision) for precision, (one, _) in evidence.items() if one.verdict == verdict]
        for verdict in ("as_good", "worse", "not_shown")
    }
    unit = next(iter(evidence.values()))[0].unit
    device = f" on {plan.device}" if plan.device else ""
    within = f"{runs.metric} within {plan.margin:g} {unit}"
    sign = 1 if is_speed else -1  # of an advantage: more speed, fewer bytes
    ratios = {
        precision: ratio
        for precision, (one, measured) in evidence.items()
        if one.verdict == "as_good" and (ratio := measured["speed_ratio" if is_speed else "stored_ratio"])
        if all(end is not None and sign * (end - 1) > 0 for end in (ratio.low, ratio.high))
    }
    if ratios:
        precision, ratio = max(ratios.items(), key=lambda item: sign * item[1].ratio)
        advantage = f"{ratio.ratio:.2f} times as fast in training"
        if not is_speed:
            advantage = f"stored in {ratio.ratio:.2f} of the bytes"
        return (
            f"Use {plan.named(precision)}: as good as {REFERENCE} ({within}), and {advantage} "
            f"({ratio.low:.2f} to {ratio.high:.2f}){device}."
        )
    use = f"Use {plan.named(REFERENCE)}:"
    if names["as_good"]:
        verb, more = "is" if len(names["as_good"]) == 1 else "are", "faster" if is_speed else "smaller"
        good = _joined(names["as_good"], "and")
        return f"{use} {good} {verb} as good ({within}), but not shown to be {more}{device}."
    if names["not_shown"]:
        rest = _joined(names["not_shown"], "or")
        return f"{use} it is not shown whether {rest} is as good ({within}). Reasons: {plan.command}"
    verb = "is" if len(names["worse"]) == 1 else "are"
    return f"{use} {_joined(names['worse'], 'and')} {verb} worse ({within})."


def _joined(names: Sequence[str], word: str) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
