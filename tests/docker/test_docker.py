"""What docker/ says, as far as it can be told without an engine: `docker/build-and-run` needs one."""

import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_line import COMMANDS, ROOT

from hpo.study.store.database import parse_url

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OF_IMAGE = [name for name, service in SERVICES.items() if "localhost/hpo" in service["image"]]


def without_variables(text: str) -> str:
    """`text` with `${NAME:-default}` replaced, as compose does."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_the_image_is_of_an_ordinary_user_and_no_secret_comes_to_lie_in_a_layer() -> None:
    text = DOCKERFILE.replace("\\\n", " ")
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text.rpartition("\nFROM ")[2], re.MULTILINE)
    given = re.findall(r"^(?:ARG|ENV) (.*)$", text, re.MULTILINE)
    assert given
    assert not [one for one in given if re.search(r"(?i)pass|token|secret|credential", one)]
    assert "--mount=type=secret,id=pip_conf" in text


def test_ports_are_on_loopback() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["dashboard"]
    assert [without_variables(port) for port in SERVICES["dashboard"]["ports"]] == ["127.0.0.1:8080:8080"]


def test_git_ignores_the_secret_files() -> None:
    files = [f"docker/{secret['file']}" for secret in COMPOSE["secrets"].values()]
    assert len(files) == 3
    ignored = subprocess.run(["git", "check-ignore", *files, "docker/.env"], cwd=ROOT, capture_output=True)
    assert ignored.stdout.decode().split() == [*files, "docker/.env"]
    assert SERVICES["database"]["environment"].keys() == {"POSTGRES_PASSWORD_FILE", "HPO_CONNECTIONS"}
    assert not re.search(r"\w+://\w*:\w+@", (DOCKER / "compose.yaml").read_text())
    for name in OF_IMAGE:
        assert SERVICES[name]["environment"]["HPO_STORAGE"] == "@/run/secrets/storage_url"


@pytest.mark.parametrize("name", OF_IMAGE)
def test_containers_of_the_image_have_no_needless_right(name: str) -> None:
    service = SERVICES[name]
    assert not without_variables(service["user"]).startswith("0")
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cuda.yaml"])
def test_commands_parse(file: str) -> None:
    services = yaml.safe_load((DOCKER / file).read_text())["services"]
    commands = [service["command"] for service in services.values() if "command" in service]
    assert commands
    for name, *arguments in commands:
        context = COMMANDS[name].make_context(name, [without_variables(argument) for argument in arguments])
        assert (ROOT / "studies" / f"{context.params['study']}.yaml").exists()


# The scripts


def test_secrets_are_made_once_for_their_owner_alone(tmp_path: Path) -> None:
    script = shutil.copy(DOCKER / "make-secrets", tmp_path)
    done = subprocess.run([script], capture_output=True, text=True, check=True)
    files = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert files.keys() == {"database_password", "storage_url", "aws_credentials"}
    assert not files["aws_credentials"]
    url = parse_url(files["storage_url"])
    assert (url.username, url.host, url.database) == ("hpo", "database", "hpo")
    assert url.password == files["database_password"]
    assert len(files["database_password"]) == 48
    assert files["database_password"] not in done.stdout + done.stderr
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    user, group = (tmp_path / ".env").read_text().strip().removeprefix("HPO_USER=").split(":")
    assert int(user) != 0
    for path in (tmp_path / "secrets").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (path.stat().st_uid, path.stat().st_gid) == (int(user), int(group))

    again = subprocess.run([script], capture_output=True, text=True)
    assert again.returncode == 1
    assert "Remove both to begin anew" in again.stderr
    assert files == {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
