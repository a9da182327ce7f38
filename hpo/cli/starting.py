"""The command `new`: a folder with a study and code of one's own, to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

from hpo.cli.options import Answer, argument, command
from hpo.errors import InputError

FILES = {"study.yaml": "study.yaml", "my_tasks.py": "my_tasks.py.txt"}


@command(folder=argument(Path, "FOLDER", "Its name becomes that of the study."))
def new(folder: Path) -> Answer:
    """Write a study file and a commented file of code of your own into a folder, to start from."""
    from hpo.config.study_name import study_name

    try:
        name = study_name(folder.absolute().name)
    except ValueError as error:
        raise InputError(f"The name of the folder {error}") from None
    if there := [str(folder / file) for file in FILES if (folder / file).exists()]:
        told = "must not be there yet; nothing was written. Name another folder."
        raise InputError(f"{' and '.join(there)} {told}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, template in FILES.items():
            text = (Path(__file__).parent / "start" / template).read_text()
            with (folder / file).open("x") as new_file:
                new_file.write(text.replace("NAME", name))
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}.") from None
    study, model = (shlex.quote(str(folder / one)) for one in ("study.yaml", "model"))
    commands = [f"hpo check {study}", f"hpo run {study}", f"hpo best {study} --export {model}"]
    text = f"{folder} has the study {name} and what it adds, my_tasks.py. Next:\n  " + "\n  ".join(commands)
    content = {"study": name, "files": [str(folder / file) for file in FILES], "next": commands}
    return Answer(content, text)
