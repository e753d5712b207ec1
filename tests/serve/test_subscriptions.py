"""A view's changes, pushed: a snapshot, then each tick once and in order, however often a
subscriber is cut off, and whatever others do.
"""

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigurationError
from headrace.serve import subscriptions as snapshots
from headrace.serve.channels import SourceReset
from headrace.serve.requests import Limits
from headrace.serve.stores import ViewStores
from headrace.serve.subscriptions import ViewEventSource
from headrace.views.store import ViewStore
from tests.serve.conftest import Client, ReceivedEvent, Start, receive
from tests.views.store_contract import COUNTS, changes, inserts, update


def insert(store: ViewStore, tick: int, key: int) -> None:
    store.commit(tick, 1, {"counts": inserts(tick, (key, tick))})


def test_the_rows_first_then_each_tick(client: Client, store: ViewStore) -> None:
    with client.follow("/views/counts/changes") as subscriber:
        snapshot = receive(subscriber)
        rows = [{"k": 1, "n": 10}, {"k": 2, "n": 20}, {"k": 3, "n": 30}]
        assert (snapshot.kind, snapshot.id) == ("snapshot", "4")
        assert snapshot.data == {
            "view": "counts",
            "tick": 4,
            "key": ["k"],
            "last": True,
            "rows": rows,
        }
        store.commit(
            6, 1, {"counts": changes(*update(5, (1, 10), (1, 11)), (6, "delete", (2, 20)))}
        )
        assert receive(subscriber) == ReceivedEvent(
            "changes",
            "5",
            {
                "tick": 5,
                "changes": [
                    {"_change_type": "update_preimage", "k": 1, "n": 10},
                    {"_change_type": "update_postimage", "k": 1, "n": 11},
                ],
            },
        )
        assert receive(subscriber) == ReceivedEvent(
            "changes", "6", {"tick": 6, "changes": [{"_change_type": "delete", "k": 2, "n": 20}]}
        )


def test_an_empty_view_and_a_stream(client: Client, store: ViewStore) -> None:
    with client.follow("/views/events/changes") as subscriber:
        assert receive(subscriber).data == {
            "view": "events",
            "tick": 4,
            "key": [],
            "last": True,
            "rows": [],
        }
        store.commit(5, 1, {"events": inserts(5, (1, 1), (1, 1))})
        assert (
            receive(subscriber).data["changes"] == [{"_change_type": "insert", "k": 1, "n": 1}] * 2
        )


def test_a_large_snapshot_comes_in_parts_of_which_the_last_says_so(
    client: Client, store: ViewStore
) -> None:
    store.commit(5, 1, {"counts": inserts(5, *((n, n) for n in range(10, 12_010)))})
    with client.follow("/views/counts/changes") as subscriber:
        parts = [receive(subscriber) for _ in range(3)]
    assert [(part.id, part.data["last"]) for part in parts] == [
        (None, False),
        (None, False),
        ("5", True),
    ]
    assert len([row for part in parts for row in part.data["rows"]]) == 12_003


def test_a_subscriber_that_is_killed_and_resumes_hears_each_change_once_in_order(
    client: Client, store: ViewStore
) -> None:
    """Cut off again and again while a writer goes on; some cuts fall between ticks, some while it
    catches up.
    """
    ticks = 120

    def write() -> None:
        for tick in range(5, 5 + ticks):
            insert(store, tick, 100 + tick)
            time.sleep(0.004)

    writer = threading.Thread(target=write)
    got: list[int] = []
    subscriber = client.follow("/views/counts/changes")
    receive(subscriber)
    writer.start()
    while len(got) < ticks:
        for _ in range(7):
            if len(got) < ticks:
                event = receive(subscriber)
                assert [change["k"] for change in event.data["changes"]] == [
                    100 + event.data["tick"]
                ]
                got.append(event.data["tick"])
        subscriber.close()
        time.sleep(0.02)
        subscriber = client.follow("/views/counts/changes", last=subscriber.last)
    subscriber.close()
    writer.join()
    assert got == list(range(5, 5 + ticks))


def test_a_subscriber_resumes_at_another_server(serve: Start, store: ViewStore) -> None:
    first, second = Client(serve().port), Client(serve().port)
    with (
        second.follow("/views/counts/changes") as other,
        first.follow("/views/counts/changes") as subscriber,
    ):
        receive(other), receive(subscriber)
        insert(store, 5, 50)
        assert receive(subscriber).id == "5"
        with second.follow("/views/counts/changes", last="5") as resumed:
            insert(store, 6, 60)
            assert receive(resumed).id == "6"


def test_a_server_that_ends_ends_its_streams(serve: Start, store: ViewStore) -> None:
    server = serve()
    with Client(server.port).follow("/views/counts/changes") as subscriber:
        receive(subscriber)
        server.stop()
        assert subscriber.next() is None


def test_an_idle_subscriber_gets_heartbeats_that_move_its_position(
    client: Client, store: ViewStore
) -> None:
    """Ticks that did not change what it wants must not make its last id too old to resume from."""
    with client.follow("/views/counts/changes", key=1) as subscriber:
        assert [row["k"] for row in receive(subscriber).data["rows"]] == [1]
        insert(store, 9, 90)
        deadline = time.monotonic() + 20
        while (line := subscriber._response.readline()) != b"id: 9\n":
            assert time.monotonic() < deadline
            assert line in {b"\n", b": heartbeat\n", b"id: 4\n"}


# What is wanted of it


def test_changes_of_a_key(client: Client, store: ViewStore) -> None:
    with client.follow("/views/counts/changes", key=2) as subscriber:
        assert receive(subscriber).data["rows"] == [{"k": 2, "n": 20}]
        insert(store, 5, 50)
        store.commit(6, 1, {"counts": changes((6, "delete", (2, 20)), (6, "delete", (3, 30)))})
        assert receive(subscriber) == ReceivedEvent(
            "changes", "6", {"tick": 6, "changes": [{"_change_type": "delete", "k": 2, "n": 20}]}
        )


def test_a_row_that_comes_to_meet_a_condition_appears_and_one_that_ceases_to_disappears(
    client: Client, store: ViewStore
) -> None:
    with client.follow("/views/counts/changes", where="n >= 20 and k != 3") as subscriber:
        assert receive(subscriber).data["rows"] == [{"k": 2, "n": 20}]
        store.commit(
            5,
            1,
            {
                "counts": changes(
                    *update(5, (1, 10), (1, 25)),
                    *update(5, (2, 20), (2, 5)),
                    *update(5, (3, 30), (3, 31)),
                )
            },
        )
        store.commit(6, 1, {"counts": changes(*update(6, (1, 25), (1, 26)))})
        kinds = [
            [
                (change["_change_type"], change["k"], change["n"])
                for change in receive(subscriber).data["changes"]
            ]
            for _ in range(2)
        ]
    assert kinds == [
        [("insert", 1, 25), ("delete", 2, 20)],
        [("update_preimage", 1, 25), ("update_postimage", 1, 26)],
    ]


def test_conditions_on_null(client: Client, store: ViewStore) -> None:
    store.commit(5, 1, {"counts": changes((5, "insert", (4, None)))})
    for where, found in (("n = null", [4]), ("n != null", [1, 2, 3]), ("n != 20", [1, 3])):
        with client.follow("/views/counts/changes", where=where) as subscriber:
            assert [row["k"] for row in receive(subscriber).data["rows"]] == found, where


BAD_CONDITIONS = [
    ({"where": "n > null"}, "null, which has no order"),
    ({"where": "n"}, "'n' is no condition"),
    ({"where": "m > 1"}, "no column 'm'"),
    ({"where": "n > x"}, "'x' is no value of the column 'n'"),
    ({"where": "n > 1 or k = 2"}, "is no condition"),
    ({"where": "n > " + "1" * 2_000}, "the limit is 1,000"),
    ({"key": ["1", "2"]}, "2 values came"),
    ({"since": 4}, "There is no parameter 'since'"),
]


@pytest.mark.parametrize(
    ("query", "reason"), BAD_CONDITIONS, ids=[reason for _, reason in BAD_CONDITIONS]
)
def test_conditions_that_cannot_be_understood(
    client: Client, store: ViewStore, query: dict[str, str], reason: str
) -> None:
    refused = client.get("/views/counts/changes", **query)
    assert refused.status == 400
    assert reason in refused.json["message"]


# Where it cannot resume


@pytest.mark.parametrize("last", ["x", "-1", "5 5", "9" * 30, "v2:", "4;DROP"])
def test_a_malformed_last_event_id_is_refused(client: Client, last: str) -> None:
    with client.follow("/views/counts/changes", last=last) as subscriber:
        assert subscriber.status == 400
        assert "is none of this server's" in subscriber.body()["message"]


def test_a_tick_that_is_not_retained_or_has_not_come_is_refused(serve: Start, state: Path) -> None:
    with ViewStore.open(state / "views.db", max_changes=8) as store:
        store.declare("counts", COUNTS, ("k",))
        for tick in range(1, 40):
            insert(store, tick, tick)
        client = Client(serve().port)
        for last in ("3", "40"):
            with client.follow("/views/counts/changes", last=last) as subscriber:
                assert subscriber.status == 410
                assert (
                    f"since tick {last} are not there: it keeps those after tick"
                    in subscriber.body()["message"]
                )


def test_more_at_once_than_is_kept_comes_as_a_new_snapshot(serve: Start, state: Path) -> None:
    with ViewStore.open(state / "views.db", max_changes=8) as store:
        store.declare("counts", COUNTS, ("k",))
        insert(store, 1, 1)
        with Client(serve().port).follow("/views/counts/changes") as subscriber:
            assert receive(subscriber).id == "1"
            store.commit(2, 1, {"counts": inserts(2, *((n, n) for n in range(2, 102)))})
            again = receive(subscriber)
            assert (again.kind, again.id, len(again.data["rows"])) == ("snapshot", "2", 101)
            insert(store, 3, 500)
            assert receive(subscriber).id == "3"


# Slow ones, and many


def test_a_slow_subscriber_is_dropped_and_resumes_while_others_and_the_writer_go_on(
    serve: Start, store: ViewStore
) -> None:
    server = serve(limits=Limits(poll_s=0.01, slow_s=0.5, ring_events=16, ring_bytes=1 << 20))
    client = Client(server.port)
    with (
        socket.create_connection(("127.0.0.1", server.port)) as slow,
        client.follow("/views/counts/changes") as quick,
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /views/counts/changes HTTP/1.1\r\nHost: localhost\r\n\r\n")
        receive(quick)
        while server.service.hub.subscribers < 2:
            time.sleep(0.01)
        started, tick = time.monotonic(), 4
        while server.service.hub.subscribers == 2:
            assert time.monotonic() - started < 60
            tick += 1
            store.commit(
                tick, 1, {"counts": inserts(tick, *((tick * 1_000 + n, n) for n in range(1_000)))}
            )
            assert receive(quick).id == str(tick)
    with client.follow("/views/counts/changes", last="4") as resumed:
        assert [receive(resumed).id for _ in range(5, tick + 1)] == [
            str(each) for each in range(5, tick + 1)
        ]


def test_a_slow_resumption_blocks_no_other_subscriber_and_frees_its_slot(
    state: Path, store: ViewStore
) -> None:
    import asyncio

    from headrace.serve.channels import Hub, SlowSubscriber
    from headrace.serve.stores import ViewStores
    from headrace.serve.subscriptions import ViewEventSource

    async def both() -> tuple[bytes, bytes]:
        hub, stores = Hub(Limits(poll_s=0.01, resuming=1, resuming_s=0.2)), ViewStores(state)
        hub.start()
        channel = await hub.channel(
            "counts", lambda: ViewEventSource(stores.locate("counts"), stores)
        )
        with hub.subscribed(channel):
            slow, quick = hub.follow(channel, 4, None), hub.follow(channel, 7, None)
            first = await anext(slow)
            waits = asyncio.ensure_future(anext(quick))
            await asyncio.sleep(0.1)
            insert(store, 8, 80)
            heard_at_once = await asyncio.wait_for(waits, 20)
            await asyncio.sleep(0.2)
            with pytest.raises(SlowSubscriber):
                await anext(slow)
            assert b"id: 6" in await anext(hub.follow(channel, 5, None)), "there is room for others"
        await hub.close()
        stores.close()
        return first, heard_at_once

    for tick in (5, 6, 7):
        insert(store, tick, tick * 10)
    first, heard_at_once = asyncio.run(both())
    assert b"id: 5" in first
    assert b"id: 8" in heard_at_once


def test_a_subscriber_that_falls_behind_the_ring_is_dropped() -> None:
    import asyncio

    import pyarrow as pa

    from headrace.serve.channels import Channel, SlowSubscriber, StreamEvent

    async def fall_behind() -> list[bytes]:
        nothing: Any = None  # the source is not asked
        channel = Channel(nothing, 0, Limits(ring_events=4))
        channel.publish(1, [StreamEvent("1", pa.table({}), b"1")])
        got, listening = [], channel.listen(0, None, nothing)
        got.append(await anext(listening))
        channel.publish(9, [StreamEvent(str(n), pa.table({}), b"%d" % n) for n in range(2, 10)])
        with pytest.raises(SlowSubscriber):
            await anext(listening)
        return got

    assert asyncio.run(fall_behind()) == [b"1"]


def test_many_subscribers_hear_the_same_and_one_too_many_is_refused(
    serve: Start, store: ViewStore
) -> None:
    server = serve(limits=Limits(poll_s=0.01, subscribers=50))
    client = Client(server.port)
    subscribers = [client.follow("/views/counts/changes") for _ in range(50)]
    try:
        assert {receive(each).id for each in subscribers} == {"4"}
        refused = client.get("/views/counts/changes")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        insert(store, 5, 50)
        assert {receive(each).id for each in subscribers} == {"5"}
    finally:
        for each in subscribers:
            each.close()
    deadline = time.monotonic() + 20
    while server.service.hub.subscribers:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_snapshot_is_written_once_for_all_who_come_while_nothing_changes(
    client: Client, store: ViewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = snapshots.encode_snapshot, []
    failures = [ConfigurationError("It cannot be read for once.")]

    def write(location: Any, select: Any) -> Any:
        written.append(select)
        if failures:
            raise failures.pop()
        return real(location, select)

    monkeypatch.setattr(snapshots, "encode_snapshot", write)
    with client.follow("/views/counts/changes") as unlucky:
        assert receive(unlucky).kind == "error"
    for _ in range(3):
        with client.follow("/views/counts/changes") as subscriber:
            assert receive(subscriber).id == "4"
    assert len(written) == 2
    with client.follow("/views/counts/changes", key=1) as subscriber:
        assert [row["k"] for row in receive(subscriber).data["rows"]] == [1]
    insert(store, 5, 50)
    with client.follow("/views/counts/changes") as subscriber:
        assert receive(subscriber).id == "5"
    assert len(written) == 4


def test_subscribers_of_a_view_that_was_emptied_followed_rows_of_another_meaning(
    tmp_path: Path,
) -> None:
    with ViewStore.open(tmp_path / "views.db") as store:
        store.declare("counts", COUNTS, ("k",))
        store.commit(3, 1, {"counts": inserts(3, (1, 1))})
        stores = ViewStores(tmp_path)
        try:
            source = ViewEventSource(stores.locate("counts"), stores)
            assert source.start() == 3
            store.rebuild(["counts"], 2, at_tick=None)
            store.commit(9, 2, {"counts": changes(*update(9, (1, 5), (1, 6)))})
            with pytest.raises(SourceReset):
                source.read(3)
        finally:
            stores.close()
