"""The command `new`: copy an example into a new folder.

An example is a folder of `studies/examples` with a study.yaml and other files, or a study file of `studies`.
The comments at the head of the study file state its question and its commands.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hpo.cli.options import Answer, argument, command, optional
from hpo.errors import InputError, did_you_mean

DEFAULT = "own_head"


@command(
    folder=argument(
        Path | None, "FOLDER", "New folder; its name becomes the study's name. Left out: list the examples."
    ),
    example=optional(str, "EXAMPLE", "The example to copy.", DEFAULT, names=("--from",)),
)
def new(folder: Path | None = None, example: str | None = None) -> Answer:
    """Copy an example into a folder as a start; without a folder, list the examples."""
    from hpo.config.study_file import INSTALLED, study_files, study_name

    examples = study_files(INSTALLED)
    if folder is None and example is not None:
        raise InputError(f"`--from {example}` needs the folder to copy to: hpo new FOLDER --from {example}")
    if folder is None:
        # Study files of the user may lack that line.
        questions = {
            name: " ".join(_head("Question", path.read_text(errors="replace")))
            for name, path in examples.items()
        }
        width = max(map(len, questions))
        lines = [f"  {name:{width}}  {question}".rstrip() for name, question in questions.items()]
        text = "\n".join(["Copy an example with `hpo new FOLDER --from EXAMPLE`:", *lines])
        return Answer({"examples": questions}, text)
    example = DEFAULT if example is None else example
    if example not in examples:
        raise InputError(f"There is no example `{example}`.{did_you_mean(example, list(examples))}")
    try:
        name = study_name(folder.absolute().name)
    except ValueError as error:
        raise InputError(f"The name of the folder {error}") from None
    path = examples[example]
    sources = {"study.yaml": path}
    if path.name == "study.yaml":
        sources = {file.name: file for file in sorted(path.parent.iterdir()) if file.is_file()}
    if there := [str(folder / file) for file in sources if (folder / file).exists()]:
        raise InputError(
            f"{' and '.join(there)} must not exist yet; nothing was written. Name another folder."
        )
    text = re.sub(r"^name: .*", f'name: "{name}"', path.read_text(), count=1, flags=re.MULTILINE)
    text = text.replace(f"make hpo STUDY={example}", "hpo run study.yaml")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, source in sources.items():
            with (folder / file).open("xb") as new_file:
                new_file.write(text.encode() if source == path else source.read_bytes())
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}.") from None
    commands = [f"cd {shlex.quote(str(folder))}", *_head("Command", text)]
    shown = f"The example {example} is in {folder}: {', '.join(sources)}. Next:\n  " + "\n  ".join(commands)
    return Answer({"study": name, "files": [str(folder / file) for file in sources], "next": commands}, shown)


def _head(key: str, text: str) -> list[str]:
    """Return the values of a key in the comments at the head of a study file."""
    return re.findall(rf"^# {key}: +(.*)$", text, re.MULTILINE)
