"""The hidden column `_marks`: what a column of the topic cannot hold is null there, and stands here as JSON, so that nothing is lost.

{"amount": {"text": "NaN"}}: the source's own text. {"document": {"unchanged": true}}: the source did not send the value, because the change left it as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

Marks = dict[int, dict[str, Any]]
"""Row -> column -> mark."""
UNCHANGED = {"unchanged": True}


def marks_column(marks: Mapping[int, Mapping[str, Any]], rows: int) -> pa.Array:
    if not marks:
        return pa.nulls(rows, pa.string())
    return pa.array([json.dumps(marks[row], ensure_ascii=False) if row in marks else None for row in range(rows)], pa.string())
