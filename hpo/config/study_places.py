"""The places where a study file is found by its name, and the examples of the package."""

from __future__ import annotations

from pathlib import Path

from hpo.config.study_file import show
from hpo.errors import NoStudyFileError, StudyFileError, did_you_mean

INSTALLED = (Path(__file__).parents[1] / "studies").resolve()
"""The studies of the package. In a checkout `hpo/studies` is a link to `studies`."""


def study_files(folder: Path) -> dict[str, Path]:
    """Return the study files of a folder, and of its examples, by name."""
    examples = {path.parent.name: path for path in sorted(folder.glob("examples/*/study.yaml"))}
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} | examples


def find_study_file(given: Path) -> Path:
    """Return the path of the study file that a user names by a name, a path or a folder.

    Raises StudyFileError for a name that no place has. The file of a path may not exist.
    """
    if not given.parts:
        raise StudyFileError(f"a study must be a name or a YAML file, but got {show(str(given))}.")
    if given.suffix in (".yaml", ".yml"):
        return given.expanduser()
    here, in_folder = study_files(Path("studies")), given.expanduser() / "study.yaml"
    if in_folder.is_file() and str(given) not in here:  # a copy of an example, before the example
        return in_folder
    if len(given.parts) != 1:
        return given.expanduser()
    known = study_files(INSTALLED) | here
    if path := known.get(str(given)):
        return path
    hint = did_you_mean(str(given), sorted(known))
    if Path(f"{given}.yaml").is_file():
        hint = f" Did you mean `./{given}.yaml`?"
    elif given.is_dir():
        hint = f" {show(str(given))} is a folder: name the YAML file in it."
    raise NoStudyFileError(f"there is no study {show(str(given))} in studies or {INSTALLED}.{hint}")
