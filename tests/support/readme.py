"""The READMEs. As a program, writes the reference of study files into `studies/REFERENCE.md`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where this file is the program

from support.study_reference import study_reference

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
STUDIES, PACKAGE, CLUSTER, BENCHMARKS, FINDINGS = (
    ROOT / folder / "README.md" for folder in ("studies", "hpo", "docker", "tests/benchmarks", "findings")
)
REFERENCE = ROOT / "studies" / "REFERENCE.md"
CHANGELOG, *FOR_VISITORS = (
    ROOT / ".github" / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")
)
READMES = (README, STUDIES, REFERENCE, PACKAGE, CLUSTER, BENCHMARKS, FINDINGS, CHANGELOG, *FOR_VISITORS)
BEGIN, END = "<!-- reference: made by `make reference` -->\n", "<!-- end of reference -->\n"


def with_reference(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{study_reference()}\n{END}{after}"


if __name__ == "__main__":
    REFERENCE.write_text(with_reference(REFERENCE.read_text()))
