"""How a sink reads its topic: in bounded pieces, every partition in turn, pairs uncut, and nothing
silently missed.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import TargetMismatch
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.sinks.topic_follower import TopicFollower

CAPTURED = "id BIGINT, body STRING, _transaction BIGINT, _order INT, _marks STRING"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        yield log


def applied(topic: str, *, at_us: int | None = None, **positions: int) -> SinkCheckpoint:
    offsets = {int(name.removeprefix("p")): offset for name, offset in positions.items()}
    return SinkCheckpoint(
        topic, "", 1, 1, offsets, time.time_ns() // 1000 if at_us is None else at_us
    )


def test_no_partition_waits_for_ever(log: hr.Log) -> None:
    log.create_topic("clicks", "n BIGINT", partitions=3)
    with log.producer("clicks") as producer:
        for partition in range(3):
            producer.append(pa.table({"n": range(1000)}), partition=partition)
    following = TopicFollower(log, "clicks", applied("clicks"))
    seen = set()
    for _ in range(3):
        piece = following.next(100)
        assert piece is not None
        assert sum(batch.num_rows for batch in piece.rows) == 100
        assert piece.behind == 3000 - sum(following.positions.values()) - 100
        seen |= set(piece.stop)
        following.advance(piece)
    assert seen == {0, 1, 2}


def test_a_change_of_key_is_not_cut(log: hr.Log) -> None:
    log.create_table("documents", CAPTURED, key="id")
    with log.transaction("writer") as tx:
        for number in range(5):
            changes = [
                {
                    "id": number,
                    "body": None,
                    "_transaction": number,
                    "_order": 0,
                    "_marks": None,
                    "_change_type": "delete",
                },
                {
                    "id": number + 100,
                    "body": "b",
                    "_transaction": number,
                    "_order": 0,
                    "_marks": None,
                    "_change_type": "insert",
                },
            ]
            tx.append("documents", changes)
    for max_rows in (1, 3, 5):
        following = TopicFollower(log, "documents", applied("documents"))
        while (piece := following.next(max_rows)) is not None:
            assert piece.stop[0] % 2 == 0
            following.advance(piece)
        assert following.positions == {0: 10}


def test_rows_that_retention_has_removed_are_missed_with_a_word(log: hr.Log) -> None:
    log.create_topic("noise", "text STRING", retention_bytes=1, segment_bytes=1 << 16)
    with log.producer("noise") as producer:
        for _ in range(4):
            producer.append(pa.table({"text": ["x" * 1000] * 100}))
    log.maintain()
    earliest = log.start_offsets("noise")[0]
    assert earliest > 0
    assert TopicFollower(log, "noise", applied("noise")).positions == {0: earliest}
    assert TopicFollower(log, "noise", applied("noise", p0=earliest)).positions == {0: earliest}
    with pytest.raises(
        TargetMismatch, match=r"retention has removed what follows[\s\S]*--start-over"
    ):
        TopicFollower(log, "noise", applied("noise", p0=earliest - 1))


def test_tombstones_that_compaction_has_removed_are_missed_with_a_word(log: hr.Log) -> None:
    log.create_table(
        "accounts",
        "id BIGINT, text STRING",
        key="id",
        history="1 second",
        tombstones="1 second",
        segment_bytes=1 << 16,
    )
    with log.producer("accounts") as producer:
        for _ in range(6):
            producer.upsert(pa.table({"id": range(100), "text": ["x" * 1000] * 100}))
    time.sleep(1.1)
    log.maintain()
    whole = log.whole_from("accounts")[0]
    assert whole > 1
    assert TopicFollower(log, "accounts", applied("accounts", p0=1)).positions == {
        0: 1
    }  # it was here a moment ago
    with pytest.raises(TargetMismatch, match=r"may have missed deletes[\s\S]*--start-over"):
        TopicFollower(log, "accounts", applied("accounts", at_us=1, p0=1))
    assert TopicFollower(log, "accounts", applied("accounts", at_us=1, p0=whole)).positions == {
        0: whole
    }
