"""Passwords, tokens and keys in texts that people see: messages, logs, reports and trackers."""

from __future__ import annotations

import re

HIDDEN = "***"
_NAMES = r"(?i:password|passwd|secret|token|api_?key|(?:access|secret|account)_?key(?:_id)?)"
_SECRETS = (
    # A password, or a token alone, in a URL.
    re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/?#@'\"<>]*:)[^\s'\"<>]*(?=@)", re.IGNORECASE),
    re.compile(r"(\bhttps?://)[^\s:/?#@'\"<>]+(?=@)", re.IGNORECASE),
    # Parameters of a URL.
    re.compile(rf"([?&;]\w*{_NAMES}=)[^\s&;,'\"<>]*"),
    re.compile(r"([?&;](?:x-amz-\w+|\w*token|sig|signature|key)=)[^\s&;,'\"<>]+", re.IGNORECASE),
    re.compile(r"(\b(?:\w*password|passwd|secret|api_?key|access_?key)=)[^\s&;,'\"<>]+", re.IGNORECASE),
    # Tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack and AWS.
    re.compile(r"\b()(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-)[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b()AKIA[0-9A-Z]{16}\b"),
)
# As libpq reads and writes it: quoted, or with a backslash before a quote or a space.
_ASSIGNED = re.compile(
    rf"""((?<![?&\w])\w*{_NAMES}\s*=\s*)('(?:[^'\\]|\\.)*'|"[^"]*"|(?:\\.|[^\s"',;\\])+)"""
)


def without_secrets(text: str) -> str:
    """Return any text, such as a whole page, with `***` in place of each password, token and key in it."""
    for secret in _SECRETS:
        text = secret.sub(rf"\g<1>{HIDDEN}", text)
    return text


def redact(text: str) -> str:
    """Return a URL, or a message of a database about one, with `***` in place of its secrets.

    A password in the URL reaches to the last `@`: it may hold an `@` or a space that nobody quoted.
    """
    text = re.sub(r"((?:^|:/+)[^:/?#\s]*):(?![/\s]).*@", rf"\1:{HIDDEN}@", text)
    return without_secrets(_ASSIGNED.sub(rf"\1{HIDDEN}", text))
