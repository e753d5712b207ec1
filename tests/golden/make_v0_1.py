# mypy: ignore-errors
"""Makes the golden directory `v0_1`. Written against Headrace 0.1 and kept for the record: it names
things as they were called then, and is not run again.

It was run by hand at commit 0f1a536, in a directory whose path says nothing about the machine:

    python -m tests.golden.make_v0_1 /golden

`v0_1/shop.tar.gz` has what it wrote below that directory:

    log/           an embedded log: everything in `log_rows`, and the topics of the shop
    state/         the state directory of the shop's pipeline, with views.db and the local stores
    reports.db     the target of the shop's SQLite sink
    parquet/       the target of its Parquet sink
    results.json   what Headrace 0.1 read from all of these, and made of the shop's further rows
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import headrace as hr
from headrace.events import NEW, Event, Handler, open_store
from headrace.log import dead
from headrace.testing.pipelines import PipelineTest
from tests.golden import log_rows
from tests.golden.clock import Clock, clock_at
from tests.golden.shop import AFTER, BEFORE, NOON, feed, outcome, plain, shop

TARGET = Path(__file__).parent / "v0_1" / "shop.tar.gz"
OPENING = NOON - timedelta(hours=1)


def make(root: Path) -> None:
    """Write everything, in the order in which it must be in the journal, and pack it."""
    root.mkdir()
    results: dict[str, Any] = {}
    with patch.object(socket, "gethostname", lambda: "golden"), clock_at(OPENING) as clock:
        with hr.open_log(f"file:{root / 'log'}") as log:
            write_topics(log, clock)
            write_transactions(log, clock)
            write_compacted(log, clock)
            write_dead_letters(log)
            write_events(log)
            log.maintain()  # compacts, and makes a checkpoint of the journal
        clock.now = NOON
        with PipelineTest(shop(root), root) as test:
            feed(test, BEFORE, clock)
            results["before"] = outcome(test)
        for topic, sink in shop(root).sinks.items():
            sink.run(topic, log=f"file:{root / 'log'}", until_caught_up=True)
        with hr.open_log(
            f"file:{root / 'log'}"
        ) as log:  # the journal goes on behind the checkpoint
            results["producer"] = write_producer(log)
            results["group"] = write_group(log)
            results["queue"] = write_queue(log, clock)
            results["log"] = log_rows.contents(log)
            results["events"] = log_rows.event_contents(log)
        results["end"] = clock.now.isoformat()
        results["after"] = continued(root, clock)
    (root / "results.json").write_text(json.dumps(results, indent=1, sort_keys=True))


def continued(root: Path, clock: Clock) -> Any:
    """What 0.1 itself makes of the rows that come after, on a copy."""
    copy = root.with_name(f"{root.name}-copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root, copy)
    try:
        with PipelineTest(shop(copy), copy) as test:
            feed(test, AFTER, clock)
            return outcome(test)
    finally:
        shutil.rmtree(copy)


def write_topics(log: hr.Log, clock: Clock) -> None:
    """Every type in three partitions, with headers; a table; a topic that gains a column."""
    log.create_topic("typed", log_rows.TYPES, key="id", partitions=3, compression="zstd")
    with log.producer("typed") as producer:
        for start in (0, 3, 6):
            rows = slice(start, start + 3)
            producer.append(log_rows.TYPED[rows], headers=log_rows.HEADERS[rows])
            clock.advance(1)
    log.append_control("typed", 1, b"control record")
    log.create_table("stock", "item BIGINT, pieces INT, place STRING", key="item", partitions=2)
    with log.producer("stock") as producer:
        row = {"item": 1, "pieces": 5, "place": "oslo"}
        producer.append(
            [{**row, "_change_type": "insert"}, {**row, "item": 2, "_change_type": "insert"}]
        )
        producer.upsert([{**row, "pieces": 6}, {**row, "item": 3, "place": None}])
        producer.delete([2])
    log.create_topic("sales", "sale BIGINT, till STRING, cents BIGINT", key="till", partitions=2)
    with log.producer("sales") as producer:
        producer.append([log_rows.sale(number) for number in range(4)])
    log.alter_topic("sales", add_columns="note STRING")


def write_transactions(log: hr.Log, clock: Clock) -> None:
    """One that is committed, with rows of two topics, offsets and a note; one that is aborted."""
    with log.transaction("mover") as transaction:
        transaction.append("sales", [{**log_rows.sale(4), "note": "moved"}])
        transaction.upsert("stock", [{"item": 4, "pieces": 1, "place": "rome"}])
        transaction.commit_offsets("movers", {"sales": {0: 1, 1: 1}})
        transaction.set_note("moved", "4")
        transaction.set_note("gone", "soon")
    clock.advance(1)
    aborted = log.transaction("mover")
    aborted.append("sales", [{**log_rows.sale(99), "note": "never"}])
    aborted.set_note("moved", "99")
    aborted.abort()
    with log.transaction("mover") as transaction:
        transaction.set_note("gone", None)


def write_compacted(log: hr.Log, clock: Clock) -> None:
    """Prices in small segments, of which compaction leaves the newest of each item."""
    log.create_topic(
        "prices", "item STRING, price BIGINT", key="item", compact=True, segment_bytes=1000
    )
    with log.producer("prices") as producer:
        for number in range(30):
            producer.append({"item": f"i{number % 3}", "price": number})
            clock.advance(1)


def write_dead_letters(log: hr.Log) -> None:
    """Two dead letters of `sales`, of which one is replayed."""
    reason: dict[str, Any] = {"place": "gateway web", "reason": "a reason"}
    row = '{"sale":50,"till":"till-0","cents":5,"note":null}'
    dead.divert(log, "sales", [{**reason, "row": row}, {**reason, "payload": b"\xff", "key": b"k"}])
    dead.replay(log, "sales", offsets=[0])


def write_events(log: hr.Log) -> None:
    """Accounts with a snapshot, and events that were appended without a decider."""
    with open_store(log, "bank") as store:
        handler = Handler(store, log_rows.accounts([]))
        for number in range(6):
            handler.handle("account-1", 100 - 30 * number, id=f"command-{number}")
        handler.handle("account-2", 7)
        store.append("cart-1", log_rows.OPENED, expected=NEW)
        store.by_entity.flush()  # as it is done every few thousand events
        store.append("cart-1", Event("Closed", type_version=2), expected=1)


def write_producer(log: hr.Log) -> Any:
    """An idempotent producer that has stored the numbers 0 to 2, of which one came twice."""
    with log.producer("sales", id="till-7") as producer:
        for number in (0, 1, 1, 2):
            position = producer.append(
                {**log_rows.sale(10 + number), "note": None}, sequence=number
            )
        spans = {str(p): [span.start, span.stop] for p, span in position.partitions().items()}
        return {"last": producer.last_sequence, "epoch": producer.epoch, "offsets": spans}


def write_group(log: hr.Log) -> Any:
    """A consumer group that has committed some of the offsets that it has read."""
    with log.consumer(["sales", "typed"], group="billing") as consumer:
        consumer.poll("0 seconds", max_rows=6)
        consumer.commit()
        consumer.poll("0 seconds", max_rows=2)  # delivered, and not committed
    crashed = log.consumer("sales", group="crashed")  # never closed: it stays a member of its group
    crashed.poll("0 seconds")
    crashed.commit({"sales": {0: 2, 1: 1}})
    return plain(log.committed("billing"))


def write_queue(log: hr.Log, clock: Clock) -> Any:
    """Messages that are acknowledged, given back, leased, dead, or were never delivered."""
    log.create_topic("emails", "recipient STRING, body STRING")
    with log.producer("emails") as producer:
        producer.append(
            [log_rows.email(number) for number in range(8)],
            headers=[[("n", b"%d" % n)] for n in range(8)],
        )
    with log.queue("emails", group="mailers", delivery_limit=1) as queue:
        (poison,) = queue.receive(1)
        poison.nack()
        first, second = queue.receive(3, visibility="1 hour")  # the poison becomes a dead letter
        first.ack()
        second.nack()
    with log.queue("emails", group="mailers", delivery_limit=3) as queue:
        taken = queue.receive(4, visibility="1 hour")
        back, done, later, leased = taken
        back.nack()
        done.ack()
        later.nack(delay="30 minutes")
        receipt = leased.receipt
    rest = {
        "offsets": [message.offset for message in taken],
        "deliveries": [message.deliveries for message in taken],
    }
    return {**rest, "receipt": receipt, "at": clock.now.isoformat()}


def pack(root: Path) -> None:
    """Pack the directory, with names in order and nothing of the machine's users and times."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = int(NOON.timestamp())
        return member

    TARGET.parent.mkdir(exist_ok=True)
    with tarfile.open(TARGET, "w:gz") as archive:
        archive.add(root, arcname="shop", filter=anonymous)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    make(directory)
    pack(directory)
