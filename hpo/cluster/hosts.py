"""Where a server listens: its addresses, free ports, and the certificate by which clients know it."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.cluster.postgres_programs import environment
from hpo.errors import InputError, RunError, shorten


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach what listens on `host`."""
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in _addresses(host))


def free_port(host: str, port: int = 0) -> int:
    """Return a port of `host` that nothing listens on, or `port` itself; OSError where that is taken."""
    family, *_, address = _addresses(host)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before do not count
        probe.bind((address[0], port, *address[2:]))
        return int(probe.getsockname()[1])


def names_of(host: str) -> list[str]:
    """The names of a server that listens on `host`; other hosts find it by the first."""
    own = socket.gethostname()
    first = own if host in ("0.0.0.0", "::") else host
    return list(dict.fromkeys([first, own, socket.getfqdn(), "localhost", "127.0.0.1"]))


def certificate(folder: Path, names: Sequence[str], user: Mapping[str, Any]) -> Path:
    """Make `server.crt`, which vouches for itself, and `server.key` in `folder`; those for `names` are kept.

    Args:
        user: options of `subprocess`, for the owner of the key.
    """
    subject = "subjectAltName=" + ",".join(f"{_kind_of_name(name)}:{name}" for name in names)
    key, made, made_for = (folder / f"server.{suffix}" for suffix in ("key", "crt", "names"))
    if made_for.exists() and made_for.read_text() == subject:
        return made
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    options = ("-x509", *kind, "-nodes", "-days", "3650")
    files = ("-keyout", str(key), "-out", str(made))
    command = ["openssl", "req", *options, *files, "-subj", "/CN=hpo", "-addext", subject]
    try:
        done = subprocess.run(
            command, env=environment(), cwd="/", capture_output=True, text=True, check=False, **user
        )
    except FileNotFoundError:
        raise InputError(
            "TLS needs a certificate, which the program `openssl` makes, but it is not there. Install it, or "
            "listen on 127.0.0.1."
        ) from None
    if done.returncode:
        raise RunError(f"openssl cannot make a certificate for {names[0]}: {shorten(done.stderr, 300)}")
    key.chmod(0o600)
    made_for.write_text(subject)
    return made


def _addresses(host: str) -> list[Any]:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"--host must be an address or a name of this machine, but got `{host}` ({error.strerror})."
        ) from None


def _kind_of_name(name: str) -> str:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "DNS"
    return "IP"
