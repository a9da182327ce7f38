"""Passwords, tokens and keys in messages, logs, reports and trackers."""

import re

HIDDEN = "***"
_NAMES = r"(?i:pass(?:word|wd|phrase)?|pwd|secret|token|api_?key|_key|(?:access|secret|account)_?key(?:_id)?)"
# A quote, `<`, `>`, `,` or `;` is a part of the password if a letter or such a sign follows. Elsewhere it
# ends a text in the code of a page, as in `"http://host:80","me@host"`.
_GOES_ON = r"(?=[\w@#$%^~]|!(?!=)|&(?!&))"
_QUOTED = rf"'+{_GOES_ON}|[\"<>]{_GOES_ON}"
_VALUE = rf"(?:[^\s&;,'\"<>]|{_QUOTED}|[,;]{_GOES_ON})+"
# It takes all up to a space, `@` or not: a search for the `@` would take quadratic time.
_USER = re.compile(
    rf"(\b[a-z][a-z0-9+.-]{{,30}}://[^\s:/?#@'\"<>]*:)((?:[^\s'\"<>]+|{_QUOTED})+)", re.IGNORECASE
)
_SECRETS = (
    # A token alone in a URL.
    re.compile(r"(\bhttps?://)[^\s:/?#@'\"<>]+(?=@)", re.IGNORECASE),
    # Parameters of a URL.
    re.compile(rf"([?&;]\w*{_NAMES}=){_VALUE}"),
    re.compile(rf"([?&;](?:x-amz-\w+|\w*token|sig|signature|key)=){_VALUE}", re.IGNORECASE),
    re.compile(rf"(\b(?:\w*password|passwd|pwd|secret|api_?key|access_?key)=){_VALUE}", re.IGNORECASE),
    # Tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack and AWS.
    re.compile(r"\b()(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-)[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b()AKIA[0-9A-Z]{16}\b"),
)
# As libpq reads and writes it: quoted, or with a backslash before a quote or a space.
_ASSIGNED = re.compile(
    rf"""((?<![?&\w])\w*{_NAMES}\s*=\s*)('(?:[^'\\]|\\.)*'|"[^"]*"|(?:\\.|[^\s"',;\\])+)"""
)


def without_secrets(text: str) -> str:
    """Return a text of any size with `***` in place of each password, token and key."""
    text = _USER.sub(_hide_password, text)
    for secret in _SECRETS:
        text = secret.sub(rf"\g<1>{HIDDEN}", text)
    return text


def _hide_password(match: re.Match[str]) -> str:
    _, at, behind = match[2].rpartition("@")
    return f"{match[1]}{HIDDEN}@{behind}" if at else match[0]


def redact(text: str) -> str:
    """Return a URL, or a database's message about it, with `***` in place of its secrets.

    A password in the URL ends at the last `@`, because it may contain an unquoted `@` or space. A password
    among the parameters ends at the next `&`.
    """
    end = "&" if re.match(r"\s*[\w+.-]+:/", text) else r"&\s"  # a message goes on behind a space
    text = re.sub(rf"([?&;]\w*{_NAMES}=)[^{end}]+", rf"\1{HIDDEN}", text)
    text = re.sub(r"((?:^|:/+)[^:/?#\s]*):(?![/\s]).*@", rf"\1:{HIDDEN}@", text)
    return without_secrets(_ASSIGNED.sub(rf"\1{HIDDEN}", text))
