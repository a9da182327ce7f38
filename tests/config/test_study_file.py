from pathlib import Path

import pytest

from hpo.config.study_file import parse_yaml_value, read_study_file
from hpo.errors import StudyFileError


def test_scalars_follow_yaml_1_2() -> None:
    numbers = "1e-5, 1E5, 1.0e-5, .5, 3, -3, 65_536, 010"
    texts = "1:30, 2024-01-01, none, off, on, yes, no, '1e-5'"
    parsed = parse_yaml_value(f"[{numbers}, {texts}, true, null, ~]")
    assert repr(parsed[:8]) == repr([1e-5, 1e5, 1e-5, 0.5, 3, -3, 65536, 10])
    assert parsed[8:-3] == ["1:30", "2024-01-01", "none", "off", "on", "yes", "no", "1e-5"]
    assert parsed[-3:] == [True, None, None]
    assert parse_yaml_value("[unclosed") == "[unclosed"


def test_lines_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("# comment\na: 1\nb:\n  c: [1, 2]\n  d: {e: 3}\n")
    file = read_study_file(path)
    assert file.content == {"a": 1, "b": {"c": [1, 2], "d": {"e": 3}}}
    assert file.lines == {"a": 2, "b": 3, "b.c": 4, "b.c.0": 4, "b.c.1": 4, "b.d": 5, "b.d.e": 5}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("!!python/object/apply:os.system ['true']", "no value is of tag:yaml"),
        ("!!bool maybe", "`maybe` is no bool"),
        ("9" * 5000, "9 ...` is no int"),
    ],
)
def test_bad_scalar_is_refused_with_line(tmp_path: Path, value: str, message: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(f"name: s\nn_trials: {value}\n")
    with pytest.raises(StudyFileError, match=rf"study\.yaml:2: this is not valid YAML: .*{message}"):
        read_study_file(path)
