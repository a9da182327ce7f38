import hashlib
from typing import Any

import pytest
from support.jsonl_sets import load

from hpo.data.synthetic import GENERATOR_VERSION, SyntheticRows

STORED = "acd9747cb227cf3e952238bb6b76935d"
"""The fingerprint of 20 rows a split, before `look_alikes` was a setting."""


def test_rows_depend_on_seed_split_and_number() -> None:
    rows = SyntheticRows("train", 10)
    assert list(rows) == SyntheticRows("train", 500)[:10]
    assert rows[7] == list(rows)[7] == rows[-3] == rows[5:9][2]
    with pytest.raises(IndexError, match="out of range"):
        rows[10]
    texts = {row.text for row in SyntheticRows("train", 50)}
    for other in (SyntheticRows("train", 50, seed=1), SyntheticRows("test", 50)):
        assert not texts & {row.text for row in other}


def test_rows_match_the_generator_version() -> None:
    """Changed rows need a new GENERATOR_VERSION: token caches know the rows by it."""
    content = repr([(row.text, row.labels, row.spans) for row in SyntheticRows("train", 200)])
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    assert (GENERATOR_VERSION, digest) == (1, "c90e8caddf7fce29")


def test_the_fingerprint_depends_on_the_settings() -> None:
    def fingerprint(**settings: Any) -> str:
        sizes = {"num_train": 20, "num_validation": 20, "num_test": 20}
        return load(source="synthetic", synthetic=sizes | settings).fingerprint

    assert fingerprint() == STORED
    changes: list[dict[str, Any]] = [{"look_alikes": 0.1}, {"seed": 1}, {"num_train": 21}]
    assert len({STORED, *(fingerprint(**change) for change in changes)}) == 4
