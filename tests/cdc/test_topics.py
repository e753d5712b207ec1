"""A captured topic, folded: values that a change left as they were come from the row before, also
when its key was another.
"""

from pathlib import Path

import pytest

import headrace as hr
from headrace.columnar.columns import HIDDEN_DDL

UNCHANGED = '{"body": {"unchanged": true}}'


@pytest.mark.parametrize("partitions", [1, 3])
def test_unchanged_values_follow_a_row_whose_key_changes(tmp_path: Path, partitions: int) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table(
            "documents",
            f"id BIGINT, title STRING, body STRING, {HIDDEN_DDL}",
            key="id",
            partitions=partitions,
        )

        def row(
            number: int, title: str, body: str | None, at: tuple[int, int], change: str = "insert"
        ) -> dict[str, object]:
            hidden = {
                "_position": 1,
                "_committed_at": None,
                "_transaction": at[0],
                "_order": at[1],
                "_marks": UNCHANGED if body is None and change != "delete" else None,
            }
            return {"id": number, "title": title, "body": body, **hidden, "_change_type": change}

        with log.producer("documents") as producer:
            producer.append([row(1, "a", "long one", (1, 0)), row(2, "b", "long two", (1, 1))])
            producer.append([row(1, "a", None, (2, 0), "delete"), row(100, "moved", None, (2, 0))])
            producer.append(
                [
                    row(100, "moved", None, (3, 0), "delete"),
                    row(200, "again", None, (3, 0)),
                    row(2, "c", None, (3, 1), "update_postimage"),
                ]
            )
            producer.append([row(200, "last", None, (4, 0), "update_postimage")])
        assert sorted(
            (each["id"], each["title"], each["body"])
            for each in hr.cdc.fold(log, "documents").to_pylist()
        ) == [(2, "c", "long two"), (200, "last", "long one")]
