"""Secrets in URLs and texts."""

import pytest

from hpo.redaction import redact, without_secrets

ODD = ["ab,cdEF12", "pa'ss", "p''ss", "p<w>", 'p"w', "ab;cd", "my secret", "p@w", "'!x", "a'b,c'd", "(a)+[b]"]
"""Passwords with special characters of the patterns."""


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("postgresql://me:se:c@ret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me@h/db?password=secret&sslmode=require", "postgresql://me@h/db?password=***&sslmode=require"),
        ("sqlite:///runs/hpo.db", "sqlite:///runs/hpo.db"),
        ("nonsense", "nonsense"),
    ],
)  # fmt: skip
def test_redacted_url(url: str, redacted: str) -> None:
    assert redact(url) == redacted


@pytest.mark.parametrize("password", ["secret", *ODD])
@pytest.mark.parametrize(
    "url", ["postgresql://me:{}@h/db", "postgresql://h/db?password={}", "postgresql://h:1/db?password={}&a=b"]
)
def test_odd_passwords_in_a_url(url: str, password: str) -> None:
    assert redact(url.format(password)) == url.format("***")


def test_keys_of_stores_and_trackers() -> None:
    names = "secret AWS_SECRET_ACCESS_KEY aws_access_key_id token WANDB_API_KEY hub_token db_pass pwd"
    for name in (*names.split(), "passphrase", "openai_key"):
        text = f"refused: {name}={{}} at https://me:{{}}@host/x"
        assert redact(text.format("abc123", "pw")) == text.format("***", "***")


TOKEN = "hf_" + "a1B2" * 9
SECRETS = [
    ("postgresql+psycopg://me:p@ss:w@host:5432/db?x=1", "postgresql+psycopg://me:***@host:5432/db?x=1"),
    ("see https://me:s3cret@host/a.csv now", "see https://me:***@host/a.csv now"),
    (f"https://{TOKEN}@huggingface.co/x", "https://***@huggingface.co/x"),
    ("https://h/x?X-Amz-Signature=abc&X-Amz-Date=1", "https://h/x?X-Amz-Signature=***&X-Amz-Date=***"),
    ("https://h/x?sv=1&amp;sig=a%2Fb", "https://h/x?sv=1&amp;sig=***"),
    ("host=h password=s3cret dbname=x", "host=h password=*** dbname=x"),
    (f"401 for {TOKEN}.", "401 for ***."),
    ("AKIAABCDEFGHIJKLMNOP", "***"),
    ("ghp_" + "x" * 36, "***"),
]
for odd in ODD:
    if " " not in odd:  # a URL in a text ends there
        SECRETS.append((f"see postgresql://u:{odd}@h/db now", "see postgresql://u:***@h/db now"))
        SECRETS.append((f"see https://h/x?token={odd}&b=2 now", "see https://h/x?token=***&b=2 now"))
HARMLESS = [
    "<a href=\"http://h:80\">me@host</a>, <a href='http://h:80'>me@host</a>",
    """f("http://h:80",'a@b');g('http://h:80'+'@','http://h:80'!='a@b')""",
    """'http://h?token='+t+"@";a={"x":"http://h?page=1","y":"a@b"}""",
    "postgresql://me@host/db",
    "https://host:8080/path?page=2",
    "mail me@host.org: it works, 12:30",
    "the token [MASK] and mask_token=[MASK]",
    "http://127.0.0.1:5000 and user@host",
    "desk-organisation-of-the-office",
    "hf_hub",
]


@pytest.mark.parametrize(("text", "redacted"), [*SECRETS, *((text, text) for text in HARMLESS)])
def test_secrets_in_a_text(text: str, redacted: str) -> None:
    assert without_secrets(text) == redacted
    assert without_secrets(redacted) == redacted
