"""The commands that a reader of the READMEs and of the study files' heads may type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from readme import PACKAGE, READMES, ROOT

PROGRAMS = (
    *("hpo", "make", "python", "torchrun", "pip"),
    *("docker", "docker-compose", "podman", "podman-compose", "kubectl", "scancel", "squeue", "ssh"),
)
"""With which a command within a sentence begins; in a block every line is one."""
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def commands() -> dict[str, Path]:
    """Each command, without comments and `.venv/bin/`, and a file that has it."""
    found: dict[str, Path] = {}
    for readme in READMES:
        text = readme.read_text()
        lines = [line for language, block in _BLOCK.findall(text) if not language for line in _lines(block)]
        for line in lines if readme != PACKAGE else ():  # whose block is a list of folders
            found.setdefault(line, readme)
        found |= {line: readme for line in _in_sentences(_BLOCK.sub("", text)) if line not in found}
    for study in sorted((ROOT / "studies").glob("*.yaml")):
        head = study.read_text().split("\nname:", 1)[0].replace("\n#", "\n")
        typed = re.findall(r"^ Command: +(.*)$", head, re.MULTILINE)
        found |= {line: study for line in [*typed, *_in_sentences(head)] if line not in found}
    return found


def _lines(block: str) -> list[str]:
    lines = (shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines())
    return [_normal(shlex.join(words)) for words in lines if words and words[0] != "export"]


def _in_sentences(text: str) -> list[str]:
    """Those that name at least one argument: the others name a program."""
    codes = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))
    return [_normal(code) for code in codes if " " in code and code.split()[0] in PROGRAMS]


def _normal(line: str) -> str:
    return line.replace(".venv/bin/", "")
