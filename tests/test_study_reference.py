from __future__ import annotations

from study_reference import meanings, study_reference

from hpo.config.trial_settings import TrialSettings


def test_every_key_stands_in_a_row_with_its_meaning() -> None:
    text = study_reference()
    for name in TrialSettings.model_fields:
        rows = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert any(meanings(TrialSettings)[name] in row.replace("\\|", "|") for row in rows), name
    for section in ("sampler", "data.synthetic", "amp", "evaluation", "search_space.<setting>"):
        assert f"`{section}`" in text


def test_values_and_defaults_are_told() -> None:
    rows = study_reference().splitlines()
    assert any(row.startswith("| `layerwise_lr_decay` | number > 0, <= 1 | `1.0` |") for row in rows)
    assert any(row.startswith("| `pooling` | `cls`, `mean`, `max`, `attention` | `mean` |") for row in rows)
    assert any(row.startswith("| `micro_batch_size` | whole number >= 1 |  |") for row in rows)
    assert any(row.startswith("| `source` | `synthetic`, `jsonl`") and "| required |" in row for row in rows)
    assert not any(row.startswith("| `path` | path | `study.yaml`") for row in rows)


def test_tables_are_whole() -> None:
    for line in study_reference().splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 5, line
