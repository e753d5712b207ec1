"""Conditions on a table's changes, also when the two images of an update come in two batches."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headrace.engine.map_tasks import filter_changes

ROWS = [
    ("insert", True, "comes"),
    ("insert", False, "is left out"),
    ("update_preimage", True, "was in"),
    ("update_postimage", True, "stays in"),
    ("update_preimage", True, "falls out"),
    ("update_postimage", False, "-"),
    ("update_preimage", False, "-"),
    ("update_postimage", True, "falls in"),
    ("update_preimage", None, "-"),
    ("update_postimage", None, "-"),
    ("delete", True, "goes"),
    ("delete", False, "was not in"),
]
EXPECTED = [
    ("insert", "comes"),
    ("update_preimage", "was in"),
    ("update_postimage", "stays in"),
    ("delete", "falls out"),
    ("insert", "falls in"),
    ("delete", "goes"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_rows_come_and_go_as_they_fit(size: int) -> None:
    kinds, fits, what = zip(*ROWS, strict=True)
    batch = pa.RecordBatch.from_pydict(
        {"what": list(what), "_change_type": list(kinds), "_keep": list(fits)}
    )
    batches = [batch.slice(first, size) for first in range(0, batch.num_rows, size)]
    kept = [row for each in filter_changes(batches) for row in each.to_pylist()]
    assert [(row["_change_type"], row["what"]) for row in kept] == EXPECTED
