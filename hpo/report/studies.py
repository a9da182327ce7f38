"""The studies of a database in a terminal. Nothing here imports torch, so `hpo studies` starts fast."""

from collections.abc import Iterator, Sequence

from hpo.report.formats import format_seconds
from hpo.report.terminal import Part
from hpo.study.reading.overview import StudyOverview


def overview(studies: Sequence[StudyOverview]) -> Iterator[Part]:
    if not studies:
        yield "The database holds no study."
    yield (
        "",
        [
            {
                "study": study.name,
                "state": {"open": "unfinished", "done": "finished"}.get(study.state, study.state),
                "trials ended": f"{study.trials['done']} of {study.trials['total']}",
                "workers": str(study.workers),
                "age": format_seconds(study.now - study.created),
            }
            for study in studies
        ],
    )
