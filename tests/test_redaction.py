from __future__ import annotations

import pytest

from hpo.redaction import redact, without_secrets

ODD = ["ab,cdEF12", "pa'ss", "p''ss", "p<w>", 'p"w', "ab;cd", "my secret", "p@w", "'!x", "a'b,c'd", "(a)+[b]"]
"""Passwords with characters at which a pattern might stop."""


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("postgresql://me:secret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql://me:se:c@ret@host/db", "postgresql://me:***@host/db"),
        (
            "postgresql://me@host/db?password=secret&sslmode=require",
            "postgresql://me@host/db?password=***&sslmode=require",
        ),
        ("sqlite:///runs/hpo.db", "sqlite:///runs/hpo.db"),
        ("nonsense", "nonsense"),
        *((f"postgresql://h/db?password={password}", "postgresql://h/db?password=***") for password in ODD),
        *(
            (f"postgresql://h:1/db?password={password}&a=b", "postgresql://h:1/db?password=***&a=b")
            for password in ODD
        ),
        *((f"postgresql://me:{password}@h/db", "postgresql://me:***@h/db") for password in ODD),
    ],
)
def test_password_is_hidden(url: str, redacted: str) -> None:
    assert redact(url) == redacted


@pytest.mark.parametrize(
    "name",
    [
        "secret",
        "AWS_SECRET_ACCESS_KEY",
        "aws_access_key_id",
        "token",
        "WANDB_API_KEY",
        "MLFLOW_TRACKING_TOKEN",
        "hub_token",
        "db_pass",
        "pwd",
        "passphrase",
        "openai_key",
    ],
)
def test_keys_of_stores_and_trackers_are_masked(name: str) -> None:
    assert redact(f"refused: {name}=abc123 at https://me:pw@host/x") == (
        f"refused: {name}=*** at https://me:***@host/x"
    )


TOKEN = "hf_" + "a1B2" * 9
SECRETS = [
    ("postgresql://me:s3cret@host/db", "postgresql://me:***@host/db"),
    ("postgresql+psycopg://me:p@ss:w@host:5432/db?x=1", "postgresql+psycopg://me:***@host:5432/db?x=1"),
    ("see https://me:s3cret@host/a.csv now", "see https://me:***@host/a.csv now"),
    (f"https://{TOKEN}@huggingface.co/x", "https://***@huggingface.co/x"),
    ("https://host/data.csv?a=1&token=abc123&b=2", "https://host/data.csv?a=1&token=***&b=2"),
    ("https://h/x?X-Amz-Signature=abc&X-Amz-Date=1", "https://h/x?X-Amz-Signature=***&X-Amz-Date=***"),
    ("https://h/x?sv=1&amp;sig=a%2Fb", "https://h/x?sv=1&amp;sig=***"),
    ("host=h password=s3cret dbname=x", "host=h password=*** dbname=x"),
    (f"401 for {TOKEN}.", "401 for ***."),
    ("AKIAABCDEFGHIJKLMNOP", "***"),
    ("ghp_" + "x" * 36, "***"),
]
SECRETS += [
    case
    for odd in ODD
    if " " not in odd  # a URL in a text ends there
    for case in (
        (f"see postgresql://u:{odd}@h/db now", "see postgresql://u:***@h/db now"),
        (f"see https://h/x?token={odd}&b=2 now", "see https://h/x?token=***&b=2 now"),
    )
]
HARMLESS = [
    "<a href=\"http://h:80\">me@host</a>, <a href='http://h:80'>me@host</a>",
    """f("http://h:80",'a@b');g('http://h:80'+'@','http://h:80'!='a@b')""",
    """'http://h?token='+t+"@";a={"x":"http://h?page=1","y":"a@b"}""",
    "postgresql://me@host/db",
    "s3://bucket/prefix",
    "https://host:8080/path?page=2",
    "mail me@host.org: it works",
    "12:30 and a@b",
    "the token [MASK] and mask_token=[MASK]",
    "http://127.0.0.1:5000 and user@host",
    "desk-organisation-of-the-office",
    "hf_hub",
]


@pytest.mark.parametrize(("text", "shown"), SECRETS)
def test_secrets_are_masked(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_stay(text: str) -> None:
    assert without_secrets(text) == text
