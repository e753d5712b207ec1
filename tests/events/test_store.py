"""Appending under an expected version, repeating by event id, loading one entity, reading all in
the global order; the index lost, damaged and behind.
"""

import random
import threading
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import BadEvent, EventIdConflict, InputError, VersionConflict
from headrace.events import ANY, NEW, Change, Event, EventStore, open_store
from headrace.events import index as event_index
from headrace.log.file.disk import Disk, DiskFile


def paid(amount: int, id: str | None = None) -> Event:
    return Event("Paid", {"amount": amount}, id=id)


def amounts(store: EventStore, entity: str) -> list[int]:
    return [event.data["amount"] for event in store.load(entity)]


def test_events_have_versions_of_their_entity_and_offsets_of_all(store: EventStore) -> None:
    store.append("a", [paid(1), paid(2)], expected=NEW)
    store.append("b", paid(3), expected=NEW)
    answer = store.append("a", paid(4), expected=2)
    assert (answer.versions, answer.offsets) == ({"a": 3}, range(3, 4))
    assert str(answer.position) == "bank:0:4"
    assert [(event.entity, event.version, event.offset) for event in store.read()] == [
        ("a", 1, 0),
        ("a", 2, 1),
        ("b", 1, 2),
        ("a", 3, 3),
    ]
    assert [(event.version, event.data) for event in store.load("a", after=1)] == [
        (2, {"amount": 2}),
        (3, {"amount": 4}),
    ]
    assert amounts(store, "b") == [3]
    assert store.entities() == [("a", 3), ("b", 1)]


@pytest.mark.parametrize(("expected", "current"), [(NEW, 2), (1, 2), (3, 2)])
def test_an_unexpected_version_is_a_conflict_that_names_both(
    store: EventStore, expected: int, current: int
) -> None:
    store.append("a", [paid(1), paid(2)])
    with pytest.raises(VersionConflict, match="nothing was stored") as error:
        store.append("a", paid(3), expected=expected)
    assert (error.value.entity, error.value.expected, error.value.current) == (
        "a",
        expected,
        current,
    )
    assert store.version("a") == 2


def test_an_append_over_several_entities_is_stored_whole_or_not_at_all(store: EventStore) -> None:
    store.append("a", paid(1))
    with pytest.raises(VersionConflict):
        store.commit([Change("b", [paid(1)], NEW), Change("a", [paid(2)], NEW)])
    assert (store.version("a"), store.version("b"), store.end()) == (1, 0, 1)
    answer = store.commit([Change("b", [paid(1)], NEW), Change("a", [paid(2), paid(3)], 1)])
    assert answer.versions == {"a": 3, "b": 1}
    assert len({event.time_us for event in store.read(1)}) == 1


def test_a_repeated_append_is_harmless(store: EventStore) -> None:
    first = store.append("a", [paid(1, "x"), paid(2, "y")], expected=NEW)
    store.append("a", paid(3))
    again = store.append("a", [paid(1, "x"), paid(2, "y")], expected=NEW)
    assert again.duplicate
    assert (again.offsets, again.versions) == (first.offsets, {"a": 2})
    assert amounts(store, "a") == [1, 2, 3]


@pytest.mark.parametrize(
    "events",
    [
        [paid(9, "x")],
        [paid(1, "x"), paid(2, "y")],
        [Event("Other", {"amount": 1}, id="x")],
        [paid(1, "x"), paid(5)],
    ],
)
def test_an_id_that_stands_for_something_else_is_refused(
    store: EventStore, events: list[Event]
) -> None:
    store.append("a", paid(1, "x"))
    with pytest.raises(EventIdConflict):
        store.append("a", events)
    with pytest.raises(EventIdConflict, match="'a'"):
        store.append("b", paid(1, "x"))
    assert store.end() == 1


def test_appending_nothing_checks_the_version_and_stores_nothing(store: EventStore) -> None:
    store.append("a", paid(1))
    assert store.append("a", [], expected=1).versions == {"a": 1}
    with pytest.raises(VersionConflict):
        store.append("a", [], expected=2)
    assert store.end() == 1


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 401, 7, None])
def test_an_invalid_entity_name_is_refused(store: EventStore, name: str) -> None:
    with pytest.raises(BadEvent, match="entity"):
        store.append(name, paid(1))


@pytest.mark.parametrize("expected", [-3, "1", None, True, 1.0])
def test_an_invalid_expected_version_is_refused(store: EventStore, expected: int) -> None:
    with pytest.raises(BadEvent, match="expected version"):
        store.append("a", paid(1), expected=expected)


@pytest.mark.parametrize(
    "data",
    [
        {"x": object()},
        {"x": float("nan")},
        {"x": b"bytes"},
        {"x": "\ud800"},
        [1],
        "text",
        {("a",): 1},
    ],
)
def test_an_event_that_cannot_be_serialised_is_named_and_nothing_is_stored(
    store: EventStore, data: dict[str, object]
) -> None:
    with pytest.raises(BadEvent, match="Paid"):
        store.commit([Change("b", [paid(1)]), Change("a", [Event("Paid", data)])])
    assert store.end() == 0


@pytest.mark.parametrize(
    "event",
    [
        Event(""),
        Event("a\nb"),
        Event("T", id=""),
        Event("T", subject="x" * 401),
        Event("T", type_version=0),
        "T",
    ],
)
def test_odd_events_are_refused(store: EventStore, event: Event) -> None:
    with pytest.raises(BadEvent):
        store.append("a", [event])


def test_one_append_has_no_entity_or_id_twice(store: EventStore) -> None:
    with pytest.raises(BadEvent, match="entity twice"):
        store.commit([Change("a", [paid(1)]), Change("a", [paid(2)])])
    with pytest.raises(BadEvent, match="id twice"):
        store.append("a", [paid(1, "x"), paid(2, "x")])


def test_a_topic_that_is_none_of_events_is_refused(log: hr.Log) -> None:
    log.create_topic("orders", "entity STRING, version BIGINT")
    with pytest.raises(InputError, match="not an event store"):
        open_store(log, "orders")


def test_a_store_that_was_made_again_must_be_opened_again(log: hr.Log, store: EventStore) -> None:
    store.append("a", paid(1))
    log.delete_topic("bank")
    log.create_topic(
        "bank",
        "entity STRING, version BIGINT, type STRING, type_version INT, id STRING, subject STRING,"
        " data STRING, state BINARY",
        key="entity",
    )
    with pytest.raises(InputError, match="made again"):
        store.load("a")


def test_large_values_and_any_text_come_back(store: EventStore) -> None:
    data = {
        "text": 'ü\u2028\n"\\ 漢字 🎈',
        "large": "x" * 3_000_000,
        "deep": {"list": [1, 2.5, None, True]},
    }
    store.append("größe/ß", Event("Típus", data, id="é"))
    (event,) = store.load("größe/ß")
    assert (event.data, event.type, event.id) == (data, "Típus", "é")


# The index


def filled(log: hr.Log, count: int) -> dict[str, list[int]]:
    expected: dict[str, list[int]] = {}
    chosen = random.Random(7)
    with open_store(log, "bank") as store:
        for first in range(0, count, 50):
            parts: dict[str, list[int]] = {}
            for amount in range(first, first + 50):
                parts.setdefault(f"e{chosen.randrange(40)}", []).append(amount)
            store.commit(
                [
                    Change(entity, [paid(each, f"id-{each}") for each in found])
                    for entity, found in parts.items()
                ]
            )
            for entity, found in parts.items():
                expected.setdefault(entity, []).extend(found)
    return expected


def check_all(store: EventStore, expected: dict[str, list[int]]) -> None:
    assert store.entities() == [(entity, len(found)) for entity, found in sorted(expected.items())]
    assert {entity: amounts(store, entity) for entity in expected} == expected


def index_directory(log: hr.Log) -> Path:
    return Path(log.address.removeprefix("file:")) / "events" / log.topic("bank").id / "index-0"


@pytest.mark.parametrize("damage", ["none", "deleted", "truncated", "garbage", "other version"])
def test_the_index_is_there_again_whatever_became_of_it(
    log: hr.Log, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(event_index, "FLUSH_ENTRIES", 300)
    monkeypatch.setattr(event_index, "_READ_ENTRIES", 500)
    expected = filled(log, 2000)
    directory, file = index_directory(log), index_directory(log) / "data.mdb"
    assert file.stat().st_size > 50_000
    if damage == "deleted":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 // 4096 * 4096])
    elif damage == "garbage":
        file.write_bytes(b"\x5a" * file.stat().st_size)
    elif damage == "other version":
        import lmdb

        with lmdb.open(str(directory), max_dbs=4) as env, env.begin(write=True) as txn:
            txn.put(b"version", b"99", db=env.open_db(b"about", txn))
    with open_store(log, "bank") as store:
        check_all(store, expected)
        assert store.append("e1", paid(expected["e1"][0], f"id-{expected['e1'][0]}")).duplicate


def test_an_index_that_is_ahead_of_the_log_is_thrown_away(tmp_path: Path) -> None:
    """A log without syncs can lose its newest rows with the machine, when the index has them."""
    import shutil

    with hr.open_log(f"file:{tmp_path / 'log'}", durability="os") as log:
        filled(log, 500)
        shutil.copytree(tmp_path / "log", tmp_path / "copy")
        with open_store(log, "bank") as store:
            store.append("late", [paid(n) for n in range(500)])
            store.by_entity.flush()
        directory = index_directory(log)
    shutil.rmtree(tmp_path / "copy" / "events")
    shutil.copytree(tmp_path / "log" / "events", tmp_path / "copy" / "events")
    assert directory.exists()
    with (
        hr.open_log(f"file:{tmp_path / 'copy'}", durability="os") as log,
        open_store(log, "bank") as store,
    ):
        assert (store.version("late"), store.end()) == (0, 500)
        assert store.append("late", paid(1), expected=NEW).versions == {"late": 1}


class FailingDisk(Disk):
    """A disk whose journal cannot be synced, or written, on request."""

    def __init__(self) -> None:
        self.broken = ""

        class File(DiskFile):
            def write(file, buffers, position):  # type: ignore[no-untyped-def] # noqa: N805, ANN001, ANN202
                if self.broken == "write" and file.path.suffix == ".journal":
                    raise OSError("the disk is on fire")
                return super().write(buffers, position)

        self.file_type = File


def test_the_draft_of_a_failed_commit_is_dropped(tmp_path: Path) -> None:
    from headrace.log.file.log import FileLog

    disk = FailingDisk()
    with (
        FileLog.open(tmp_path / "log", disk=disk) as log,
        open_store(log, "bank") as store,
        FileLog.open(tmp_path / "log") as other,
        open_store(other, "bank") as theirs,
    ):
        store.append("a", paid(1))
        disk.broken = "write"
        with pytest.raises(OSError, match="on fire"):
            store.append("a", [paid(2, "lost"), paid(3)])
        disk.broken = ""
        assert amounts(store, "a") == [1]
        theirs.append("b", [paid(7), paid(8)])
        assert (amounts(store, "a"), amounts(store, "b")) == ([1], [7, 8])
        assert not store.append("a", paid(2, "lost"), expected=1).duplicate
        assert amounts(theirs, "a") == [1, 2]
        assert [event.offset for event in store.read()] == [0, 1, 2, 3]


def test_threads_on_one_entity_and_on_many(log: hr.Log, store: EventStore) -> None:
    failures: list[BaseException] = []

    def write(thread: int) -> None:
        try:
            for n in range(40):
                while True:
                    try:
                        store.append("hot", paid(thread), expected=store.version("hot"))
                        break
                    except VersionConflict:
                        continue
                store.append(f"own-{thread}", paid(n), expected=n)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    followed = [event.offset for event in store.follow(idle="1 second")]
    for thread in threads:
        thread.join()
    assert not failures
    assert followed == list(range(6 * 80))
    assert [event.version for event in store.load("hot")] == list(range(1, 241))
    assert sorted(amounts(store, "hot")) == sorted(list(range(6)) * 40)
    assert amounts(store, "own-3") == list(range(40))


def test_a_reader_keeps_what_it_saw_when_events_move_to_the_index(store: EventStore) -> None:
    store.append("a", [paid(n) for n in range(5)])
    with store.by_entity.look(end=store.end()) as look:
        store.by_entity.flush()
        store.append("a", paid(9))
        assert (len(look.texts("a")), look.head("a"), look.entities()) == (5, 5, [("a", 5)])
    assert store.version("a") == 6


def test_two_stores_of_one_topic_are_closed_one_by_one(log: hr.Log, store: EventStore) -> None:
    with open_store(log, "bank") as other:
        other.append("a", paid(1))
        other.close()
    assert amounts(store, "a") == [1]
    store.append("a", paid(2), expected=1)
    store.by_entity.flush()
    assert amounts(store, "a") == [1, 2]


def test_an_index_that_cannot_be_written_does_not_fail_an_append(
    store: EventStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_index, "FLUSH_ENTRIES", 2)

    def full(*_: object) -> int:
        raise OSError("no room")

    monkeypatch.setattr(store.by_entity._index, "put", full)
    store.append("a", [paid(1), paid(2), paid(3)])
    assert "no room" in caplog.text
    assert amounts(store, "a") == [1, 2, 3]


def test_any_appends_behind_whatever_there_is(store: EventStore) -> None:
    for n in range(5):
        assert store.append("a", paid(n), expected=ANY).versions == {"a": n + 1}
