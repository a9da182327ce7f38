#!/usr/bin/env bash
# An expert expects: a study may go on with a wider range, as Optuna allows, and its sampler then draws from the
#   whole range, as RandomSampler, TPESampler and NSGAIISampler do.
#
# What happens: QMCSampler takes its search space from the first trial of the study, and draws from that range for
#   ever. Trials that ask for a wider range stay inside the old one. There is no error and no warning.
#
# Seen with: optuna 5.0.0, scipy 1.17.1.
# Who is hurt: who sees the best values at the end of a range, widens it, and goes on in the same study. The new part
#   of the range stays empty, and the study says that the old end is best.
# Instead: a new study, with the best trials enqueued or added.
set -uo pipefail
folder=$(mktemp -d) || exit 3
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" &&
    "$folder/venv/bin/python" -m pip install --quiet optuna==5.0.0 scipy==1.17.1 numpy==2.4.6 || exit 3

"$folder/venv/bin/python" -I - <<'PY'
import sys
import warnings

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.simplefilter("ignore")
OLD, NEW, TRIALS = 1.0, 100.0, 64


def share_of_new_part(sampler):
    """Return the share of trials above the old range, after the range has become 100 times as wide."""
    study = optuna.create_study(sampler=sampler)
    for high in (OLD, NEW):
        study.optimize(lambda trial, high=high: trial.suggest_float("x", 0.0, high), n_trials=TRIALS)
    return sum(trial.params["x"] > OLD for trial in study.trials[TRIALS:]) / TRIALS


samplers = {
    "QMCSampler": optuna.samplers.QMCSampler(seed=1),
    "RandomSampler": optuna.samplers.RandomSampler(seed=1),
    "TPESampler": optuna.samplers.TPESampler(seed=1),
    "NSGAIISampler": optuna.samplers.NSGAIISampler(seed=1, population_size=16),
}
found = {name: share_of_new_part(sampler) for name, sampler in samplers.items()}
for name, share in found.items():
    print(f"{name}: {share:.0%} of {TRIALS} trials lie in the new part, which is 99% of the range")
sys.exit(found.pop("QMCSampler") != 0 or found["RandomSampler"] < 0.9)
PY
