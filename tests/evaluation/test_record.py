from __future__ import annotations

from typing import Any

import pytest
from support.detailed_documents import every_kind

from hpo.errors import DataError
from hpo.evaluation.record import VERSION, read_document


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in every_kind().items() if name != key}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (without("version"), f"must have the version {VERSION}, but this one has none."),
        ({**every_kind(), "version": 1}, f"must have the version {VERSION}, but this one has 1."),
        (without("baseline"), "this is no whole detailed evaluation: baseline: Field required."),
        ({**every_kind(), "version": 99}, f"must have the version {VERSION}, but this one has 99."),
        (["a list"], f"must have the version {VERSION}, but this one has none."),
        (without("tasks"), "this is no whole detailed evaluation: tasks: Field required."),
        ({**every_kind(), "num_examples": "many"}, "num_examples: Input should be a valid integer"),
    ],
)
def test_what_is_not_whole_is_refused_in_one_line(document: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        read_document(document)
    assert "\n" not in str(error.value)
