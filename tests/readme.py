"""Writes the study file's reference into the README, between its two markers: `make reference`."""

from __future__ import annotations

from pathlib import Path

from study_reference import study_reference

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- reference: made by `make reference` -->\n", "<!-- end of reference -->\n"


def with_reference(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{study_reference()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_reference(README.read_text()))
