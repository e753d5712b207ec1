"""What Headrace 0.1 wrote can be opened, and goes on: a log, an event store, the state, views and
sinks of a pipeline. `v0_1/shop.tar.gz` stays as it is; `make_v0_1` says what is in it.

Each test unpacks it into a directory of its own. The clock stands where it stood when the directory
was packed, since leases, idempotent producers and ticks go by it.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pyarrow.dataset import dataset

import headrace as hr
from headrace.errors import HeadraceError, StateElsewhere, VersionConflict
from headrace.events import NEW, Event, Handler, open_store
from headrace.log import dead_letters as dead
from headrace.log.file import liveness
from headrace.log.file.consumer import FileConsumer
from headrace.runtime.query_assignment import former_steps, known_names
from headrace.testing.pipelines import PipelineTest
from tests.golden import log_rows
from tests.golden.clock import Clock, clock_at
from tests.golden.shop import (
    AFTER,
    BEFORE,
    NOON,
    Row,
    feed,
    outcome,
    plain,
    shop,
)

ARCHIVE = Path(__file__).parent / "v0_1" / "shop.tar.gz"
Change = Callable[[Path], None]


@cache
def recorded() -> Mapping[str, Any]:
    """What Headrace 0.1 read from the directory, and what it made of further rows."""
    with tarfile.open(ARCHIVE) as archive:
        file = archive.extractfile("shop/results.json")
        assert file is not None
        results: Mapping[str, Any] = json.load(file)
        return results


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """All that is in the archive, unpacked."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "shop"


@pytest.fixture
def log_root(tmp_path: Path) -> Path:
    """The log alone, unpacked."""
    with tarfile.open(ARCHIVE) as archive:
        members = [each for each in archive.getmembers() if each.name.startswith("shop/log")]
        archive.extractall(tmp_path, members=members, filter="data")
    return tmp_path / "shop"


@pytest.fixture
def clock() -> Iterator[Clock]:
    with clock_at(datetime.fromisoformat(recorded()["end"])) as clock:
        yield clock


@pytest.fixture
def log(log_root: Path, clock: Clock) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{log_root / 'log'}", create=False) as log:
        yield log


def leave(_root: Path) -> None:
    """Change nothing."""


def lose_checkpoints(root: Path) -> None:
    checkpoints = list((root / "log" / "journal").glob("*.checkpoint"))
    assert checkpoints
    for checkpoint in checkpoints:
        checkpoint.unlink()


def lose_event_index(root: Path) -> None:
    shutil.rmtree(root / "log" / "events")


def lose_local_stores(root: Path) -> None:
    shutil.rmtree(root / "state" / "local")


def rows_of(log: hr.Log, topic: str) -> list[Row]:
    """The rows of a topic in order, with their partitions and offsets."""
    rows: list[Row] = log.read(topic).to_pylist()
    return [{name: value for name, value in row.items() if name != "_timestamp"} for row in rows]


# The log


@pytest.mark.parametrize("change", [leave, lose_checkpoints])
def test_every_topic_group_and_note_is_as_it_was(
    log_root: Path, clock: Clock, change: Change
) -> None:
    change(log_root)
    with hr.open_log(f"file:{log_root / 'log'}", create=False) as log:
        assert log_rows.contents(log) == recorded()["log"]
        assert log.verify() == []


def test_rows_of_every_type_are_those_that_were_appended(log: hr.Log) -> None:
    stored = {row["id"]: row for row in log.read("typed", headers=True).to_pylist()}
    assert sorted(stored) == sorted(row["id"] for row in log_rows.TYPED)
    for row, headers in zip(log_rows.TYPED, log_rows.HEADERS, strict=True):
        found = stored[row["id"]]
        assert plain({name: found[name] for name in row}) == plain(row)
        assert [(each["key"], each["value"]) for each in found["_headers"] or []] == headers
    controls = [record for partition in range(3) for record in log.read_control("typed", partition)]
    assert [(record.partition, record.payload) for record in controls] == [(1, b"control record")]


def test_a_key_stays_in_its_partition(log: hr.Log) -> None:
    before = {row["id"]: row["_partition"] for row in rows_of(log, "typed")}
    ends = log.end_offsets("typed")
    with log.producer("typed") as producer:
        producer.append(log_rows.TYPED)
    again = [row for row in rows_of(log, "typed") if row["_offset"] >= ends[row["_partition"]]]
    assert {row["id"]: row["_partition"] for row in again} == before
    assert len(again) == len(before)


def test_a_group_goes_on_behind_its_committed_offsets(log: hr.Log) -> None:
    committed = log.committed("billing")
    with log.producer("sales") as producer:
        producer.append({**log_rows.sale(60), "note": "new"})
    expected = [
        (topic, row["_partition"], row["_offset"])
        for topic, offsets in committed.items()
        for row in rows_of(log, topic)
        if row["_offset"] >= offsets[row["_partition"]]
    ]
    delivered: list[tuple[str, int, int]] = []
    with log.consumer(["sales", "typed"], group="billing") as consumer:
        while batches := consumer.poll("0 seconds"):
            for batch in batches:
                topic = "typed" if "flag" in batch.schema.names else "sales"
                delivered += [
                    (topic, row["_partition"], row["_offset"]) for row in batch.to_pylist()
                ]
        consumer.commit()
    assert sorted(delivered) == sorted(expected)
    for topic in committed:
        assert log.committed("billing")[topic] == log.end_offsets(topic)


def test_a_member_that_crashed_is_replaced(log: hr.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat does not change for a session timeout, by the clock of who looks."""
    assert [member.host for member in log.group("crashed").members] == ["golden"]
    with log.consumer("sales", group="crashed") as consumer:
        assert consumer.positions() == {}
        later_us = liveness.monotonic_us() + 11_000_000
        monkeypatch.setattr(liveness, "monotonic_us", lambda: later_us)
        assert isinstance(consumer, FileConsumer)
        consumer._last_check_s -= 11
        consumer._refresh()
        assert consumer.positions() == {"sales": {0: 2, 1: 1}}
        assert len(log.group("crashed").members) == 1


def test_a_queue_delivers_what_was_not_acknowledged_and_nothing_else(
    log: hr.Log, clock: Clock
) -> None:
    """Of eight messages, 0 is a dead letter, 1 and 3 are acknowledged, 2 was given back, 4 was
    given back for half an hour, 5 is leased for an hour, 6 and 7 were never delivered.
    """
    with log.queue("emails", group="mailers", delivery_limit=5) as queue:
        now = queue.receive(10, visibility="2 hours")
        assert [(each.offset, each.deliveries) for each in now] == [(2, 3), (6, 1), (7, 1)]
        assert [each.row for each in now] == [log_rows.email(each.offset) for each in now]
        assert [each.headers for each in now] == [[("n", b"%d" % each.offset)] for each in now]
        clock.advance(31 * 60)
        assert [
            (each.offset, each.deliveries) for each in queue.receive(10, visibility="2 hours")
        ] == [(4, 2)]
        clock.advance(31 * 60)
        assert [
            (each.offset, each.deliveries) for each in queue.receive(10, visibility="2 hours")
        ] == [(5, 2)]
        assert queue.receive(10) == []
    assert [
        dead_letter["source_offset"] for dead_letter in dead.read_dead_letters(log, "emails")
    ] == [0]


def test_a_receipt_still_acknowledges_its_message(log: hr.Log, clock: Clock) -> None:
    with log.queue("emails", group="mailers") as queue:
        queue.ack([recorded()["queue"]["receipt"]])
        clock.advance(2 * 3600)
        assert [each.offset for each in queue.receive(10)] == [2, 4, 6, 7]


def test_an_idempotent_producer_drops_a_repeat_and_accepts_the_next_number(log: hr.Log) -> None:
    known = recorded()["producer"]
    before = rows_of(log, "sales")
    with log.producer("sales", id="till-7") as producer:
        assert producer.last_sequence == known["last"] == 2
        assert producer.epoch == known["epoch"] + 1
        repeated = producer.append({**log_rows.sale(12), "note": None}, sequence=2)
        spans = {
            str(number): [span.start, span.stop] for number, span in repeated.partitions().items()
        }
        assert (repeated.duplicate, spans) == (True, known["offsets"])
        assert rows_of(log, "sales") == before
        assert not producer.append({**log_rows.sale(13), "note": None}, sequence=3).duplicate
    added = [row for row in rows_of(log, "sales") if row not in before]
    assert added == [{**log_rows.sale(13), "note": None, "_partition": 1, "_offset": 3}]


def test_a_transaction_goes_on_from_its_notes_and_offsets(log: hr.Log) -> None:
    with log.transaction("mover") as transaction:
        transaction.delete("stock", [1])
        transaction.set_note("moved", "5", expect="4")
        transaction.commit_offsets("movers", {"sales": {0: 3}})
    assert (log.note("moved"), log.committed("movers")) == ("5", {"sales": {0: 3, 1: 1}})
    changes = [
        (row["_change_type"], row["pieces"]) for row in rows_of(log, "stock") if row["item"] == 1
    ]
    assert changes == [("insert", 5), ("update_postimage", 6), ("delete", None)]


def test_a_dead_letter_is_not_replayed_twice(log: hr.Log) -> None:
    before = rows_of(log, "sales")
    result = dead.replay(log, "sales")
    assert (result.replayed, [failure[:2] for failure in result.failed]) == (0, [(0, 1)])
    assert rows_of(log, "sales") == before


def test_compaction_goes_on_over_what_was_compacted(log: hr.Log) -> None:
    with log.producer("prices") as producer:
        for number in range(30, 60):
            producer.append({"item": f"i{number % 3}", "price": number})
    before = {row["_offset"]: row for row in rows_of(log, "prices")}
    log.maintain()
    after = rows_of(log, "prices")
    assert all(before[row["_offset"]] == row for row in after)
    assert {row["item"]: row["price"] for row in after} == {"i0": 57, "i1": 58, "i2": 59}
    assert len(after) < len(before)


# Events


@pytest.mark.parametrize("change", [leave, lose_event_index])
def test_events_are_loaded_and_appended_under_the_expected_version(
    log_root: Path, clock: Clock, change: Change
) -> None:
    change(log_root)
    with hr.open_log(f"file:{log_root / 'log'}", create=False) as log:
        assert log_rows.event_contents(log) == recorded()["events"]
        with open_store(log, "bank") as store:
            with pytest.raises(VersionConflict) as conflict:
                store.append("cart-1", Event("Opened"), expected=NEW)
            assert conflict.value.current == 2
            assert store.append("cart-1", log_rows.OPENED, expected=NEW).duplicate
            appended = store.append("cart-1", Event("Reopened"), expected=2)
            assert (appended.versions, appended.duplicate) == ({"cart-1": 3}, False)
            assert [each.type for each in store.load("cart-1")] == ["Opened", "Closed", "Reopened"]
        with open_store(log, "bank") as store:
            assert store.entities() == [("account-1", 6), ("account-2", 1), ("cart-1", 3)]
            assert [event.offset for event in store.read()] == list(range(10))


def test_a_state_is_folded_from_its_snapshot_on(log: hr.Log) -> None:
    folded: list[Any] = []
    with open_store(log, "bank") as store:
        handler = Handler(store, log_rows.accounts(folded))
        assert handler.versioned_state("account-1") == (6, log_rows.Account(150))
        assert folded == [log_rows.Withdrawn(20), log_rows.Withdrawn(50)]
        repeated = handler.handle("account-1", 100, id="command-0")
        assert (repeated.duplicate, repeated.events) == (True, (log_rows.Deposited(100),))
        assert handler.handle("account-1", 1, id="command-6").version == 7
        assert handler.state("account-1") == log_rows.Account(151)


# The pipeline


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the shop emits if it gets all rows from the start, over the same ticks."""
    root = tmp_path_factory.mktemp("fresh")
    with clock_at(NOON) as clock, PipelineTest(shop(root), root) as test:
        feed(test, [*BEFORE, *AFTER], clock, at_once=True)
        return outcome(test)


LOST = {"placed", "placed_topic"}
"""Outputs of a full join. Headrace 0.1 lost a row of it when the partner went: it emitted the
insert of the unmatched row before the delete of the matched one, under the same key.
"""
BY_TIME = {
    "totals", "totals_topic", "minutes", "minutes_topic", "compared", "newest", "devices.sqlite",
    "placed", "placed_topic",
}  # fmt: skip
"""Outputs with `first`, `last` or `to_table`, which went by arrival. A pipeline that began so goes
on so; a fresh one goes by event time.
"""


def assert_same(actual: Any, expected: Any, *, but: Collection[str] = ()) -> None:
    """Compare two outcomes part by part, so that a failure names the view or topic."""
    assert actual.keys() == expected.keys()
    for kind, parts in expected.items():
        if isinstance(parts, dict):
            assert actual[kind].keys() == parts.keys()
            for name, part in parts.items():
                if name not in but:
                    assert actual[kind][name] == part, f"{kind} {name}"
        else:
            assert actual[kind] == parts, kind


@pytest.mark.parametrize(("change", "shards"), [(leave, 2), (lose_local_stores, 3)])
def test_a_pipeline_goes_on_as_if_it_had_never_stopped(
    root: Path, clock: Clock, fresh: Any, change: Change, shards: int
) -> None:
    change(root)
    with PipelineTest(shop(root), root, shards=shards) as test:
        assert_same(outcome(test), recorded()["before"])
        feed(test, AFTER, clock, at_once=True)
        after = outcome(test)
    assert_same(after, recorded()["after"], but=LOST)
    assert_same(after, fresh, but=BY_TIME)
    assert after["views"]["placed"] == fresh["views"]["placed"]
    assert len(after["views"]["placed"]) == len(recorded()["after"]["views"]["placed"]) + 4


def test_steps_go_on_with_the_results_they_began_with(log_root: Path, log: hr.Log) -> None:
    """Null is no group of theirs; `first`, `last` and `to_table` go by arrival."""
    declared = shop(log_root).plan()
    plan = known_names(declared, log)
    former = former_steps(declared, plan)
    assert {"totals.aggregate", "minutes.window", "newest.to_table", "unique.dedupe"} <= set(former)
    assert "tiers.distinct" not in former
    for name in former:
        assert not plan.step(name).allows_null_keys
    details = {name: plan.step(name).details() for name in former}
    assert "by=" not in str(details["totals.aggregate"]["aggregates"])
    assert "by" not in details["newest.to_table"]
    again = known_names(plan, log)
    assert again.describe() == plan.describe()


def test_the_recorded_ticks_are_replayed(root: Path, clock: Clock) -> None:
    """Another version computes the same rows from the old log, without the old state."""
    with PipelineTest(shop(root), root) as test:
        replayed = test.replay("again")
        replayed.settle()
        views = {name: replayed.view(f"{name}.again") for name in recorded()["before"]["views"]}
        topics = {name: replayed.rows(f"{name}.again") for name in recorded()["before"]["topics"]}
        replayed.close()
    before = recorded()["before"]
    assert_same({"views": plain(views)}, {"views": before["views"]}, but=BY_TIME)
    assert_same({"topics": plain(topics)}, {"topics": before["topics"]}, but=BY_TIME)


def test_sinks_go_on_behind_what_their_targets_have(root: Path, clock: Clock) -> None:
    address = f"file:{root / 'log'}"
    sinks = shop(root).sinks
    checks = {topic: sink.check(topic, log=address) for topic, sink in sinks.items()}
    with PipelineTest(shop(root), root) as test:
        for topic, checked in checks.items():
            assert (checked.is_equal, checked.positions) == (True, test.log.end_offsets(topic))
        feed(test, AFTER, clock, at_once=True)
        devices = test.folded("devices.sqlite", "device")
        rows = {topic: rows_of(test.log, topic) for topic in sinks}
    for topic, sink in sinks.items():
        statuses: list[Any] = []
        sink.run(topic, log=address, until_caught_up=True, on_status=statuses.append)
        new = [row for row in rows[topic] if row["_offset"] >= checks[topic].positions[0]]
        assert statuses[-1].rows == len(new) > 0
        assert sink.check(topic, log=address).is_equal
    with closing(sqlite3.connect(root / "reports.db")) as database:
        found = database.execute("SELECT device, n, price FROM devices").fetchall()
    assert sorted(found) == sorted((d, row["n"], str(row["price"])) for d, row in devices.items())
    columns = ["_offset", "order_id", "name"]
    files = dataset(sorted((root / "parquet").rglob("*.parquet"))).to_table(columns=columns)
    known = [{name: row[name] for name in columns} for row in rows["known.parquet"]]
    assert files.sort_by("_offset").to_pylist() == known


def test_without_its_state_the_pipeline_is_refused(root: Path, clock: Clock) -> None:
    shutil.rmtree(root / "state")
    with pytest.raises(StateElsewhere):
        PipelineTest(shop(root), root)


def test_damaged_state_is_refused_by_name(root: Path, clock: Clock) -> None:
    """State is read from its files if there are no local stores; a flipped byte is noticed."""
    lose_local_stores(root)
    for path in (root / "state" / "steps" / "totals.aggregate").glob("*.state"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(bytes(content))
    with (
        PipelineTest(shop(root), root) as test,
        pytest.raises(HeadraceError, match="totals.aggregate"),
    ):
        feed(test, AFTER, clock, at_once=True)
