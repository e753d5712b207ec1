"""Excision: a subject's events are gone from every file, offsets stay, others go on; stopped at
every step and begun again; what cannot be reached is named.
"""

import gzip
import sqlite3
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.errors import InputError, NotForgotten, UnknownSubject, VersionConflict
from headrace.events import (
    NEW,
    Change,
    Event,
    EventStore,
    Handler,
    digest,
    excise,
    open_store,
    prove,
)
from headrace.events.privacy.scan import scan
from tests.events.totals import TOTALS

EMAIL = 'ada "the countess" lovelace@example.com'


class Killed(Exception):
    """The process was killed here."""


def fill(store: EventStore) -> None:
    for n in range(30):
        store.commit(
            [
                Change(
                    f"customer-{n % 5}",
                    [
                        Event(
                            "Visited",
                            {"n": n, "email": EMAIL if n % 5 == 2 else "someone@example.com"},
                            subject=str(n % 5),
                        )
                    ],
                ),
                Change("shop", [Event("Counted", {"n": n})]),
            ]
        )


def root(store: EventStore) -> Path:
    return store.log.store.root


def check_gone(store: EventStore) -> None:
    assert scan([root(store)], [EMAIL]) == []
    assert store.load("customer-2") == []
    assert [event.data["n"] for event in store.load("customer-3")] == [3, 8, 13, 18, 23, 28]
    offsets = [event.offset for event in store.read()]
    assert offsets == [offset for offset in range(60) if offset % 2 or offset // 2 % 5 != 2]
    assert store.log.verify() == []


def test_a_subject_is_gone_from_every_file_and_others_go_on(store: EventStore) -> None:
    fill(store)
    store.by_entity.flush()
    assert len(scan([root(store)], [EMAIL])) >= 3  # segment, journal, index
    done = excise(store, "2", values=[EMAIL])
    assert (done.events, done.derived) == (6, {})
    check_gone(store)
    assert store.append("shop", Event("Counted", {"n": 30}), expected=30).offsets == range(60, 61)
    rows = store.log.read("bank.forgotten").to_pylist()
    assert [row["step"] for row in rows] == ["begun", "kept", "done"]
    with pytest.raises(UnknownSubject, match="'2'"):
        excise(store, "2")


def test_other_processes_see_an_excision(tmp_path: Path, store: EventStore) -> None:
    with (
        hr.open_log(store.log.address, durability="os") as other_log,
        open_store(other_log, "bank") as other,
    ):
        fill(store)
        assert len(other.load("customer-2")) == 6
        other.by_entity.flush()
        excise(store, "2", values=[EMAIL])
        other.append("shop", Event("Counted", {"n": 30}), expected=30)  # before it has looked
        assert other.load("customer-2") == []
        with pytest.raises(VersionConflict) as conflict:
            other.append("customer-2", Event("Back", {}), expected=NEW)
        assert conflict.value.current == 6
        assert other.append("customer-2", Event("Back", {}), expected=6).versions == {
            "customer-2": 7
        }
        assert [(event.type, event.version) for event in store.load("customer-2")] == [("Back", 7)]


def test_versions_are_not_given_out_again(tmp_path: Path, store: EventStore) -> None:
    handler = Handler(store, TOTALS)
    for _ in range(3):
        store.append("ada", Event("Added", {"amount": 5}, subject="9"))
    store.append("bob", [Event("Added", {"amount": 1}), Event("Added", {"amount": 2}, subject="9")])
    assert handler.state("ada").sum == 15
    excise(store, "9")
    assert (
        store.version("ada"),
        store.load("ada"),
        handler.versioned_state("ada")[0],
        handler.state("ada").sum,
    ) == (3, [], 3, 0)
    assert (store.version("bob"), handler.versioned_state("bob")[0], handler.state("bob").sum) == (
        2,
        2,
        1,
    )
    assert [handler.handle(entity, 1).version for entity in ("ada", "bob")] == [4, 3]
    assert store.append("ada", Event("Added", {"amount": 1})).versions == {"ada": 5}
    assert "ada" not in "".join(map(str, store.log.read("bank.forgotten").to_pylist()))
    with hr.open_log(store.log.address, durability="os") as log, open_store(log, "bank") as other:
        assert [event.version for event in other.load("ada")] == [4, 5]
    assert [path.name for path in (root(store) / "events").glob("*/index-*")] == ["index-1"]


def steps(tmp_path: Path) -> list[str]:
    """The audit record of an excision."""
    seen: list[str] = []
    with (
        hr.open_log(f"file:{tmp_path / 'first'}", durability="os") as log,
        open_store(log, "bank") as store,
    ):
        fill(store)
        excise(store, "2", values=[EMAIL], step=seen.append)
    return seen


def test_an_excision_killed_at_any_step_is_resumed(tmp_path: Path) -> None:
    names = steps(tmp_path)
    assert len(names) >= 9
    for at in range(len(names)):
        address = f"file:{tmp_path / str(at)}"
        with hr.open_log(address, durability="os") as log, open_store(log, "bank") as store:
            fill(store)
            left = [at]

            def die(_name: str, left: list[int] = left) -> None:
                if not left[0]:
                    raise Killed
                left[0] -= 1

            with pytest.raises(Killed):
                excise(store, "2", values=[EMAIL], step=die)
        with hr.open_log(address, durability="os") as log, open_store(log, "bank") as store:
            if names[at] != "done":
                excise(store, "2", values=[EMAIL])
            check_gone(store)


def test_rows_of_derived_topics_go_and_outside_files_are_named(
    tmp_path: Path, store: EventStore
) -> None:
    fill(store)
    store.log.create_topic("mails", "address STRING, n BIGINT", compression="zstd")
    with store.log.producer("mails") as producer:
        producer.append([{"address": EMAIL, "n": 1}, {"address": "someone@example.com", "n": 2}])
    backups = tmp_path / "backups"
    backups.mkdir()
    (backups / "dump.gz").write_bytes(gzip.compress(EMAIL.encode()))
    pq.write_table(pa.table({"email": [EMAIL]}), backups / "old.parquet", compression="zstd")
    with sqlite3.connect(backups / "views.db") as views:
        views.execute("CREATE TABLE t (x TEXT)")
        views.execute("INSERT INTO t VALUES (?)", ("x" * 5000 + EMAIL,))
    views.close()
    (backups / "free.txt").write_text("nothing")
    (backups / "archive.zst").write_bytes(b"\x28\xb5\x2f\xfd packed")
    with pytest.raises(NotForgotten) as error:
        excise(store, "2", values=[EMAIL], also=[backups])
    for name in ("dump.gz", "old.parquet", "views.db", "archive.zst"):
        assert name in str(error.value)
    assert "free.txt" not in str(error.value)
    assert [row["n"] for row in store.log.read("mails").to_pylist()] == [2]
    check_gone(store)
    with pytest.raises(NotForgotten):
        prove(store, [EMAIL], also=[backups])
    prove(store, [EMAIL])


def test_odd_requests_are_refused_and_nothing_is_done(tmp_path: Path, store: EventStore) -> None:
    fill(store)
    with pytest.raises(UnknownSubject):
        excise(store, "nobody")
    with pytest.raises(InputError, match="too short"):
        excise(store, "2", values=["a"])
    assert len(store.load("customer-2")) == 6
    with pytest.raises(InputError, match="does not exist"):
        prove(store, [EMAIL], also=[tmp_path / "nowhere"])


def test_snapshots_go_with_the_index(store: EventStore) -> None:
    handler = Handler(store, TOTALS)
    for _ in range(4):
        handler.handle("a", 1)
    store.append("a", Event("Added", {"amount": 1000}, subject="9"))
    assert handler.state("a").sum == 1004
    handler.handle("a", 4)
    store.by_entity.flush()
    excise(store, "9")
    assert handler.state("a").sum == 8
    assert handler.handle("a", 1).version == 7


def test_replicas_have_the_same_digest_and_others_not(tmp_path: Path, store: EventStore) -> None:
    with (
        hr.open_log(f"file:{tmp_path / 'replica'}", durability="os") as log,
        open_store(log, "copy") as replica,
    ):
        fill(store)
        for event in store.read():
            replica.append(event.entity, Event(event.type, event.data, subject=event.subject))
        ours, theirs = digest(store, ranges=4), digest(replica, ranges=4)
        assert ours == theirs
        assert (sum(each.entities for each in ours), sum(each.events for each in ours)) == (6, 60)
        replica.append("shop", Event("Counted", {"n": 99}))
        assert (
            sum(one != other for one, other in zip(ours, digest(replica, ranges=4), strict=True))
            == 1
        )
