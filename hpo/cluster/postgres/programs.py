"""The programs of PostgreSQL on this machine, and their user.

The newest programs create a new database. An existing database needs the major version that created it.
Debian and Red Hat install PostgreSQL outside the PATH.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.errors import InputError

_INSTALLED_IN = ("lib/postgresql/*/bin", "pgsql-*/bin")
"""Folders under /usr on Debian and on Red Hat."""


@dataclass(frozen=True)
class Programs:
    """A folder of PostgreSQL's programs, all of one version."""

    folder: Path
    version: tuple[int, ...]
    user: Mapping[str, Any]
    """Options of `subprocess` for the server's user."""

    def run(self, program: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program as the server's user and wait for its end."""
        return _run([self.folder / program, *arguments], **self.user, **options)


def server_user(data: Path) -> dict[str, Any]:
    """Return the options of `subprocess` for the user of the server: PostgreSQL refuses to run as root.

    Raises InputError if this process is root and there is no other user.
    """
    if os.geteuid() != 0:
        return {}
    if data.exists() and (owner := data.stat()).st_uid:
        return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise InputError(
        "PostgreSQL refuses to run as root, and this machine has neither a user `postgres` nor `nobody`. "
        "Start the database as another user."
    )


def find_programs(user: Mapping[str, Any], major: int | None = None) -> Programs:
    """Return the newest programs that `user` can run, of the `major` version if given. Raises InputError."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += [folder for pattern in _INSTALLED_IN for folder in Path("/usr").glob(pattern)]
    versions = {folder: version for folder in folders if (version := _version(folder, user))}
    usable = {folder: version for folder, version in versions.items() if major in (None, version[0])}
    if usable:
        newest = max(usable, key=lambda folder: usable[folder])
        return Programs((newest / "postgres").resolve().parent, usable[newest], user)
    installed = ", ".join(f"{version[0]} in {folder}" for folder, version in versions.items()) or "none"
    raise InputError(
        f"PostgreSQL {major or ''} must be installed, but this machine has {installed}. Install it (Debian: "
        "`apt-get install postgresql`; without root: conda's package `postgresql`, or a module of the "
        "cluster), with the folder of `initdb` and `postgres` on the PATH."
    )


def _version(folder: Path, user: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the version of the programs of a folder, or () if `user` cannot run them."""
    if not all(os.access(folder / name, os.F_OK) for name in ("initdb", "pg_ctl", "postgres")):
        return ()
    try:
        output = _run([folder / "postgres", "--version"], **user).stdout
    except OSError:
        return ()
    version = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)*)", output)
    return tuple(map(int, version[1].split("."))) if version else ()


def _run(command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program with English messages and without libpq's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "HPO_"))}
    options = {"env": {**kept, "LC_ALL": "C"}, "cwd": "/", **options}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
