"""The READMEs. As a program, writes the study file's reference into `studies/README.md`: `make reference`."""

from __future__ import annotations

from pathlib import Path

from study_reference import study_reference

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
STUDIES, PACKAGE, CLUSTER, BENCHMARKS = (
    ROOT / folder / "README.md" for folder in ("studies", "hpo", "docker", "tests/benchmarks")
)
READMES = (README, STUDIES, PACKAGE, CLUSTER, BENCHMARKS)
BEGIN, END = "<!-- reference: made by `make reference` -->\n", "<!-- end of reference -->\n"


def with_reference(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{study_reference()}\n{END}{after}"


if __name__ == "__main__":
    STUDIES.write_text(with_reference(STUDIES.read_text()))
