"""Removed settings and commands, and their replacements.

A key of a study file has its dotted path, without the indices of lists: `objective.metric`. A setting of a
trial has the key `training.NAME`, which also stands for `search_space.NAME`. Commands and options look as a
user types them: `hpo compare --seeds`. A stored study with a removed key is refused with the same message.
"""

from __future__ import annotations

from collections.abc import Sequence

REMOVED: dict[str, str] = {
    "hpo compare --price": "The probabilities that it printed were wrong. Leave it out.",
    "hpo verify --parts": "Use `fp32_parts: auto`, which finds the parts of a model that need fp32.",
    "hpo status --interval": "Leave it out: --watch updates every 5 seconds.",
    "hpo best --overwrite": "Name another folder, or remove the model that is in this one.",
    "budget.cost": "Use `budget.hours`: the cost divided by the price of an hour.",
    "budget.cost_per_hour": "Use `budget.hours`: the cost divided by the price of an hour.",
    "priority": "Start workers for each study: `hpo worker STUDY`.",
    "hpo worker --idle-timeout": "Start `hpo worker STUDY` when the study has trials to run.",
    "first.csv": "Copy that study into this database (`hpo copy`), and use `first: {study: NAME}`.",
    "learn_from": "Use `first: {study: NAME}`, which tries the best configurations of that study first.",
    "stop_when_unlikely": "Use fewer trials (`n_trials`) or fewer hours (`budget.hours`).",
    "hpo submit --kubernetes": "Apply the manifests in docker/kubernetes (docker/README.md).",
    "hpo submit --image": "Apply the manifests in docker/kubernetes (docker/README.md).",
    "hpo submit --volume-claim": "Apply the manifests in docker/kubernetes (docker/README.md).",
    "training.compile_dynamic": "Leave it out: PyTorch decides which shapes are dynamic.",
    "training.embedding_state": "Leave it out: the moments of embeddings are always in fp32.",
    "training.growth_factor": "Set `amp.growth_factor`.",
    "training.growth_interval": "Set `amp.growth_interval`.",
    "training.backoff_factor": "Set `amp.backoff_factor`.",
}
"""Replacements as one or two sentences, by key or command."""


def removed_key(where: Sequence[str | int]) -> str | None:
    """Return the message for a removed key of a study file; None if the key was not removed."""
    key = ".".join(part for part in where if isinstance(part, str))
    key = key.replace("search_space.", "training.", 1) if key.startswith("search_space.") else key
    return f"this key was removed. {REMOVED[key]}" if key in REMOVED else None


def removed_command(arguments: Sequence[str]) -> str | None:
    """Return the message for the first removed command or option in `arguments`, the words after `hpo`."""
    words = [argument.partition("=")[0] for argument in arguments]
    for typed, instead in REMOVED.items():
        program, *parts = typed.split()
        command = [part for part in parts if not part.startswith("-")]
        options = parts[len(command) :]
        if program == "hpo" and words[: len(command)] == command and {*options} <= {*words}:
            return f"`{typed}` was removed. {instead}"
    return None
