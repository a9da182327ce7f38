from __future__ import annotations

import hashlib
import re
from dataclasses import asdict
from typing import Any

import pytest

from hpo.config.data_config import DataConfig, SyntheticConfig
from hpo.data.dataset import load_data
from hpo.data.examples import RowChecker
from hpo.data.synthetic import GENERATOR_VERSION, TASKS_JSON, SyntheticRows
from hpo.data.tasks import parse_tasks

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


def test_rows_pass_the_check_of_every_other_source() -> None:
    checker = RowChecker(parse_tasks(TASKS_JSON, "synthetic"), None, {})
    for row in SyntheticRows("train", 300):
        raw = asdict(row)
        del raw["segments"], raw["alt_spans"], raw["annotated"]
        example, problems = checker.check(raw)
        assert (example, problems) == (row, [])


def test_labels_evidence_severity_and_score_agree() -> None:
    for row in SyntheticRows("train", 500):
        held = row.labels["criteria"]
        assert isinstance(held, list)
        assert set(held) == set(row.spans)
        severities = ["none", "mild", "mild", "moderate", "moderate", *["severe"] * 4]
        assert row.labels["severity"] == severities[len(held)]
        assert len(held) - 0.5 <= float(str(row.labels["burden"])) <= 3 * len(held) + 0.5
        for spans in row.spans.values():
            for start, end in spans:
                sentence = row.text[start:end]
                assert sentence[-1] in ".!"
                assert start == 0 or row.text[start - 1] in " \n"
                assert sentence[0].isupper() or row.text.lower() == row.text


def test_label_noise_removes_and_adds_labels() -> None:
    clean, noisy = (SyntheticRows("train", 300, label_noise=noise) for noise in (0.0, 1.0))
    for ours, theirs in zip(clean, noisy, strict=True):
        assert ours.text == theirs.text
        assert not set(ours.spans) & set(theirs.spans)
    assert any(row.spans for row in noisy)


def test_posts_without_look_alikes() -> None:
    plain = SyntheticRows("train", 200, look_alikes=0.0)
    assert not any(re.search(r"not true|used to|My brother", row.text) for row in plain if not row.spans)


def test_default_look_alikes_keep_the_fingerprint_of_older_studies() -> None:
    def fingerprint(**settings: Any) -> str:
        return load_data(DataConfig(source="synthetic", synthetic=SyntheticConfig(**settings))).fingerprint

    sizes = {"num_train": 20, "num_validation": 20, "num_test": 20}
    assert fingerprint(**sizes) == STORED
    assert fingerprint(**sizes, look_alikes=0.1) != STORED
