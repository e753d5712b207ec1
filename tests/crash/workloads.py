"""What is being done to a log while its power is cut. Each workload is small, and changes the disk
in ways that another one does not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.log.file import committer, producer, staging, transaction
from headrace.log.file.maintenance import create_checkpoint, run_maintenance
from tests.crash.power import Row, Run

SCHEMA = "n BIGINT, text STRING"
Workload = Callable[[Run], None]


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the limits small, so that a small workload meets them."""
    monkeypatch.setattr(committer, "INLINE_BYTES", 2_000)
    monkeypatch.setattr(producer, "MAX_COMMIT_BYTES", 8_000)
    monkeypatch.setattr(transaction, "MAX_BYTES_IN_MEMORY", 4_000)
    monkeypatch.setattr(staging, "MAX_COPIED_BYTES", 4_000)


def rows(first: int, count: int, text_bytes: int = 3) -> list[Row]:
    return [{"n": n, "text": f"{n:x}" * (text_bytes // 2)} for n in range(first, first + count)]


def small_appends(run: Run) -> None:
    run.log.create_topic("a", SCHEMA, partitions=2)
    run.log.create_topic("b", SCHEMA)
    for n in range(6):
        run.log.producer("a").append(rows(10 * n, 3))
        run.log.producer("b").append(rows(n, 1), headers=[[("k", b"v")]])
    run.log.append_control("b", 0, b"tick")
    run.look()


def large_appends(run: Run) -> None:
    """Rows that the journal does not carry, and appends so large that they are staged."""
    run.log.create_topic("a", SCHEMA, partitions=2)
    run.log.producer("a").append(rows(0, 10))
    run.log.producer("a").append(rows(100, 10, 600))
    run.log.producer("a").append(rows(200, 20, 1200), partition=1)
    run.log.producer("a").append(rows(300, 1))
    run.log.producer("a").append(rows(400, 24, 1000))
    run.log.producer("a").append(rows(500, 2))
    run.look()


def idempotent_producers(run: Run) -> None:
    run.log.create_topic("a", SCHEMA, partitions=2)
    for life in range(3):
        with run.log.producer("a", id="till") as till:
            for n in range(3):
                till.append(rows(life * 10 + n, 2), sequence=till.last_sequence + 1)
            till.append(rows(99, 2), sequence=till.last_sequence)
    run.look()


def transactions(run: Run) -> None:
    """Topics, offsets and notes together, also staged ones, adopted ones, and one that is given
    up.
    """
    log = run.log
    log.create_topic("a", SCHEMA, partitions=2)
    log.create_topic("b", SCHEMA)
    for n in range(2):
        with log.transaction("job") as tx:
            tx.append("a", rows(10 * n, 4))
            tx.append("b", rows(10 * n, 1))
            tx.commit_offsets("readers", {"a": {0: n, 1: n}})
            tx.set_note("last", str(n))
    staged = log.stage(
        "b", [log.read("a", columns=["n", "text"]).to_table().combine_chunks().to_batches()[0]]
    )
    with log.transaction("job") as tx:
        tx.append("a", rows(100, 8, 1500))
        tx.append("b", rows(100, 1))
        tx.adopt(staged)
        tx.commit_offsets("readers", {"b": {0: 2}})
    given_up = log.transaction("job")
    given_up.append("a", rows(666, 9, 1500))
    given_up.abort()
    run.look()


def segment_rolls(run: Run) -> None:
    run.log.create_topic("a", SCHEMA, segment_bytes=3200)
    for n in range(8):
        run.log.producer("a").append(rows(10 * n, 2, 300 if n % 3 else 2500))
    run.log.alter_topic("a", add_columns="extra INT")
    run.log.producer("a").append([{"n": 1000, "text": "wide", "extra": 1}])
    run.log.alter_topic("a", partitions=2)
    run.log.producer("a").append([{"n": 1001, "text": "wide", "extra": 1}], partition=1)
    run.look()


def checkpoints(run: Run) -> None:
    """The journal rolls, and its old files go."""
    run.log.create_topic("a", SCHEMA, partitions=2)
    for n in range(4):
        run.log.producer("a", id="till").append(rows(10 * n, 3))
        run.log.producer("a").append(rows(100 * n, 1, 2500))
        create_checkpoint(run.log)
        run.log.producer("a").append(rows(10 * n, 1))
    run.log.maintain()
    run.look()


def retention(run: Run) -> None:
    run.log.create_topic("a", SCHEMA, segment_bytes=1800, retention_bytes=4000)
    run.log.create_topic("gone", SCHEMA)
    run.log.producer("gone").append(rows(0, 2))
    for n in range(9):
        run.log.producer("a").append(rows(10 * n, 2, 100))
        run.look()
        if n % 3 == 2:
            run.log.maintain("a")
    run.log.delete_topic("gone")
    run.log.maintain()
    run.log.producer("a").append(rows(1000, 1))
    run.look()


def retention_between_checkpoints(run: Run) -> None:
    """Segments go that the journal still speaks of."""
    run.log.create_topic("a", SCHEMA, segment_bytes=1800, retention_bytes=4000, retention="1 hour")
    for n in range(9):
        run.log.producer("a").append(rows(10 * n, 1, 50))
        run.log.producer("a").append(rows(10 * n + 1, 1, 100))
        run.look()
        if n == 3:
            create_checkpoint(run.log)
        if n % 3 == 2:
            run_maintenance(run.log)
    run.look()


def compaction(run: Run) -> None:
    run.log.create_topic("a", SCHEMA, key="n", compact=True, segment_bytes=2000)
    run.log.create_table(
        "t",
        SCHEMA,
        key="n",
        history="0 seconds",
        tombstones="0 seconds",
        segment_bytes=2000,
    )
    for n in range(8):
        run.log.producer("a").append([{"n": n % 3, "text": f"{n}" * 100}])
        with run.log.producer("t") as table:
            table.upsert([{"n": n % 2, "text": f"{n}" * 100}])
        run.look()
        if n % 3 == 2:
            run.log.maintain()
    run.look()


def queues(run: Run) -> None:
    run.log.create_topic("a", SCHEMA, partitions=2)
    run.log.producer("a").append(rows(0, 12))
    queue = run.log.queue("a", "workers", delivery_limit=1)
    for _ in range(3):
        acknowledged, returned, kept = queue.receive(3, visibility="1 hour")
        acknowledged.ack()
        kept.renew("2 hours")
        returned.nack("1 hour")
    queue.receive(1)[0].nack()
    queue.receive(12, visibility="1 hour")  # what was given back at once goes to the dead letters
    run.look()


def groups(run: Run) -> None:
    run.log.create_topic("a", SCHEMA, partitions=2)
    for n in range(4):
        run.log.producer("a").append(rows(10 * n, 4))
        with run.log.consumer("a", group="readers") as consumer:
            consumer.poll("0 seconds")
            consumer.commit()
            consumer.poll("0 seconds")
    run.log.reset_group("readers", "a", "earliest")
    run.look()


def everything(run: Run) -> None:
    """A little of each, in one log."""
    log = run.log
    log.create_topic("a", SCHEMA, partitions=2, segment_bytes=4500, exist_ok=True)
    log.create_topic("b", SCHEMA, key="n", compact=True, segment_bytes=2000, exist_ok=True)
    for n in range(4):
        with log.producer("a", id="till") as till:
            till.append(rows(n, 3), sequence=till.last_sequence + 1)
        with log.transaction("job") as tx:
            tx.append("a", rows(10 * n, 4, 1500 if n % 2 else 100))
            tx.append("b", [{"n": n % 2, "text": f"{n}" * 150}])
            tx.commit_offsets("readers", {"a": {0: n, 1: n}})
            tx.set_note("last", str(n))
        log.producer("a").append(rows(100 * n, 6, 1600))
        run.look()
        for message in log.queue("a", "workers").receive(2, visibility="1 hour"):
            message.ack()
        if n % 2:
            log.maintain()
    run.look()


WORKLOADS: tuple[Workload, ...] = (
    small_appends,
    large_appends,
    idempotent_producers,
    transactions,
    segment_rolls,
    checkpoints,
    retention,
    retention_between_checkpoints,
    compaction,
    queues,
    groups,
    everything,
)
