"""The commands of the READMEs and of the study files' heads: all are taken, and a reader's are executed."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from support.command_line import COMMANDS, hpo_command, ok
from support.readme import PACKAGE, README, READMES, ROOT
from support.tiny import ENCODER, write_study

from hpo.config.study_file import study_files

PROGRAMS = (
    *("hpo", "make", "python", "torchrun", "pip"),
    *("docker", "docker-compose", "podman", "podman-compose", "kubectl", "scancel", "squeue", "ssh"),
)
"""With which a command within a sentence begins; in a block every line is one."""
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Each command, without comments and `.venv/bin/`."""
    found: list[str] = []
    for readme in READMES:
        text = readme.read_text().replace(".venv/bin/", "")
        if readme != PACKAGE:  # whose block is a list of folders
            blocks = [block for language, block in _BLOCK.findall(text) if not language]
            found += [line for block in blocks for line in _lines(block)]
        found += _in_sentences(_BLOCK.sub("", text))
    for study in study_files(ROOT / "studies").values():
        head = study.read_text().split("\nname:", 1)[0].replace("\n#", "\n")
        found += [*re.findall(r"^ Command: +(.*)$", head, re.MULTILINE), *_in_sentences(head)]
    return list(dict.fromkeys(found))


def _lines(block: str) -> list[str]:
    lines = (shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines())
    return [shlex.join(words) for words in lines if words and words[0] != "export"]


def _in_sentences(text: str) -> list[str]:
    """Return the commands with an argument. The others name a program."""
    codes = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))
    return [code for code in codes if " " in code and code.split()[0] in PROGRAMS]


WRITTEN = commands()
PLACEHOLDERS = {"SPLIT": "test", "N": "3"}
"""Words of a README for which an option takes no other text."""

TYPED = (
    # The study that comes first, as `multitask` here.
    *("hpo init STUDY", "hpo check STUDY", "hpo plan STUDY", "hpo train STUDY", "hpo worker STUDY"),
    *("hpo run STUDY", "make hpo STUDY=multitask", "make hpo", "make report STUDY=multitask"),
    *("hpo report STUDY", "hpo status STUDY", "hpo best STUDY", "hpo best multitask"),
    *("hpo best STUDY --evaluate test", "hpo best STUDY --export model"),
    # One's own data, and what is done with studies.
    *("hpo check own_data", "make hpo STUDY=own_data", "hpo studies", "hpo doctor STUDY", "hpo doctor"),
    *("hpo pause STUDY", "hpo resume STUDY", "hpo cancel STUDY", "make hpo STUDY=precision"),
)
"""What `test_a_reader_types` executes. Tests of the commands execute the others, with what they need."""


def words_of_hpo(line: str) -> list[str]:
    """What follows `hpo`, or the image that is this command; of other programs nothing."""
    words = shlex.split(line)
    programs = [at for at, word in enumerate(words) if word in ("hpo", "localhost/hpo:cpu")]
    return words[programs[0] + 1 :] if programs and words[0] not in ("make", "python", "kubectl") else []


@pytest.mark.parametrize("line", [line for line in WRITTEN if words_of_hpo(line)])
def test_commands_in_the_readmes_parse(line: str) -> None:
    """Commands, options and their values. A sentence may leave arguments out."""
    words = [PLACEHOLDERS.get(word, word) for word in words_of_hpo(line)]
    name = " ".join(words[:2]) if words[0] == "database" else words[0]
    if name not in ("--help", "--version", "--install-completion"):
        try:
            COMMANDS[name].make_context(name, words[len(name.split()) :])
        except typer.BadParameter as error:
            if not error.format_message().startswith("Missing "):
                raise


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `make` finds everything installed, with tiny studies under the names of ours."""
    folder = tmp_path_factory.mktemp("project")
    for file in ("Makefile", "pyproject.toml", "docker/constraints.txt"):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    (folder / ".venv").mkdir()
    for done in (".installed", *(f".installed-{extra}" for extra in ("dev", "bench", "fp8", "onnx"))):
        (folder / ".venv" / done).touch()
    studies = folder / "studies"
    studies.mkdir()
    for name in ("multitask", "precision"):
        write_study(studies, name=name, amp={"preset": "basic"}).rename(studies / f"{name}.yaml")
    write_own_data(studies)
    return folder


def write_own_data(studies: Path) -> None:
    """`own_data.yaml` with a tiny encoder, and the row of the README among rows of its form."""
    study = yaml.safe_load((ROOT / "studies" / "own_data.yaml").read_text())
    study |= {"model": {"encoder": ENCODER}, "n_trials": 1, "amp": {"preset": "basic"}}
    study["training"] = {"max_steps": 4, "max_length": 64, "seed": 42}
    study["search_space"] = {"learning_rate": study["search_space"]["learning_rate"]}
    (studies / "own_data.yaml").write_text(yaml.safe_dump(study))
    (line,) = re.findall(r"```json\n(.*?)```", README.read_text(), re.DOTALL)
    given = json.loads(line)
    texts = (f"Late again, for the {number}th time!" for number in range(60))
    more = given | {"labels": {"topic": "delivery", **given["labels"]}}
    rows = [given, *({**more, "id": f"more-{number}", "text": text} for number, text in enumerate(texts))]
    (studies / "my_data").mkdir()
    (studies / "my_data" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def recipe(folder: Path, *words: str) -> list[list[str]]:
    """The commands that `make` would execute."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "HPO_STORAGE")}
    command = ["make", "--no-print-directory", "--dry-run", *words]
    printed = subprocess.check_output(command, cwd=folder, env=environment, text=True)
    lines = printed.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("make: ")]


def test_a_reader_types(project: Path) -> None:
    """The commands one after another, each with what those before it have left."""
    assert set(TYPED) <= {*WRITTEN}
    done: list[list[str]] = []
    for line in TYPED:
        program, *words = shlex.split(line)
        typed = [words] if program == "hpo" else [called[1:] for called in recipe(project, *words)]
        for arguments in typed:
            study = ["multitask"] if arguments == ["init"] else []
            arguments = ["multitask" if word == "STUDY" else word for word in arguments] + study
            if arguments not in done:
                ok(hpo_command(project, *arguments))
                done.append(arguments)
    assert (project / "runs/multitask/report/report.html").is_file()
    assert (project / "model/hpo.json").is_file()
    own = ok(hpo_command(project, "status", "own_data", "--json")).json
    assert own["outcomes"] == {"complete": 1}
