"""Subscriptions keep their position, and move it in one commit with what was made of the events."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import InputError, SubscriptionFenced, VersionConflict
from headrace.events import (
    EXISTS,
    NEW,
    Change,
    Decider,
    Event,
    EventStore,
    Handler,
    RecordedEvent,
    open_store,
    stream,
)
from headrace.events.event import FIRST_SCHEMA


def fill(store: EventStore, count: int = 30) -> None:
    for number in range(count):
        entity = f"{('account', 'order')[number % 2]}-{number % 5}"
        store.append(entity, Event(("Odd", "Even")[number % 3 == 0], {"n": number}))


def numbers(events: object) -> list[int]:
    return [event.data["n"] for event in events]  # type: ignore[attr-defined]


def test_a_subscription_goes_on_where_it_was(store: EventStore) -> None:
    fill(store)
    subscription = store.subscribe("reader")
    assert numbers(subscription.poll(7)) == list(range(7))
    subscription.commit()
    assert numbers(subscription.poll(3)) == [7, 8, 9]
    again = store.subscribe("reader", start="now")  # where it begins is asked once
    assert numbers(again) == list(range(7, 30))
    assert again.poll(timeout="10 ms") == []
    assert store.subscribe("new", start="now").poll() == []
    assert numbers(store.subscribe("later", start=28)) == [28, 29]
    with pytest.raises(InputError, match="cannot start at 'here'"):
        store.subscribe("bad", start="here")  # type: ignore[arg-type]


def test_a_subscription_by_category_entity_and_type(store: EventStore) -> None:
    fill(store)
    every = list(store.read())
    cases: list[tuple[str, dict[str, Any], Callable[[RecordedEvent], bool]]] = [
        ("a", {"category": "order"}, lambda e: e.category == "order"),
        ("b", {"entity": "account-2"}, lambda e: e.entity == "account-2"),
        ("c", {"types": ["Even"]}, lambda e: e.type == "Even"),
        (
            "d",
            {"types": ["Even"], "category": "account"},
            lambda e: e.type == "Even" and e.category == "account",
        ),
    ]
    for name, options, fits in cases:
        expected = [event for event in every if fits(event)]
        assert expected
        subscription = store.subscribe(name, **options)
        found = []
        while events := subscription.poll(2):
            found += events
            subscription.commit()
        subscription.commit()  # behind events that do not fit, too
        assert found == expected
        assert subscription.committed == 30


def _maybe_killed(attempt: int) -> None:
    if attempt % 2 == 0:
        raise KeyboardInterrupt


def test_the_position_and_rows_are_one_transaction(store: EventStore) -> None:
    log = store.log
    log.create_topic("copies", "n BIGINT")
    fill(store)
    for attempt in range(20):
        subscription = store.subscribe("copier")
        while events := subscription.poll(4):
            try:
                with log.transaction("copier") as tx:
                    tx.append("copies", [{"n": event.data["n"]} for event in events])
                    subscription.commit(tx)
                    _maybe_killed(attempt)  # before the commit
            except KeyboardInterrupt:
                break
            if attempt % 4 == 1:
                break  # killed after the commit
    assert [row["n"] for row in log.read("copies").to_pylist()] == list(range(30))


def test_the_position_and_other_events_are_one_commit(store: EventStore) -> None:
    fill(store, 10)
    subscription = store.subscribe("sums", types=["Odd", "Even"])
    events = subscription.poll()
    total = Event("Summed", {"sum": sum(numbers(events))})
    store.commit([Change("sums-1", [total])], subscription=subscription)
    assert store.subscribe("sums").committed == 10
    other = store.subscribe("sums")
    fill(store, 2)
    other.poll()
    other.commit()
    subscription.poll()
    with pytest.raises(SubscriptionFenced, match="moved by another"):
        store.commit([Change("sums-1", [total])], subscription=subscription)
    with pytest.raises(SubscriptionFenced):
        subscription.commit()
    assert store.version("sums-1") == 1
    subscription.rewind()
    assert subscription.poll() == []


def test_metadata_is_recorded_and_passed_on(store: EventStore) -> None:
    @dataclass(frozen=True)
    class Went:
        to: str

    decider = Decider("d", 0, lambda c, _s: [c], lambda s, _e: s, events=(Went,))
    handler = Handler(store, decider)
    handler.handle("a", Went("x"), id="request-1", metadata={"user": "ada"})
    (first,) = store.load("a")
    assert (first.correlation_id, first.causation_id, first.metadata) == (
        "request-1",
        "request-1",
        {"user": "ada"},
    )
    handler.handle("b", Went("y"), caused_by=first)
    (second,) = store.load("b")
    assert (second.correlation_id, second.causation_id) == ("request-1", "request-1/0")
    handler.handle("c", Went("z"), caused_by=second)
    (third,) = store.load("c")
    assert (third.correlation_id, third.causation_id) == ("request-1", "b/1")
    store.by_entity.flush()
    assert [(e.correlation_id, e.metadata) for e in store.read()] == [
        ("request-1", {"user": "ada"}),
        ("request-1", None),
        ("request-1", None),
    ]
    again = handler.handle("a", Went("x"), id="request-1", metadata={"user": "ben"})
    assert again.duplicate


def test_a_store_of_an_earlier_headrace_gets_metadata_when_it_is_needed(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}", durability="os") as log:
        log.create_topic("old", FIRST_SCHEMA, key="entity", partitions=1)
        with open_store(log, "old") as store:
            store.append("a", Event("Went", {"n": 1}))
            assert "metadata" not in log.topic("old").schema
            store.append("a", Event("Went", {"n": 2}, correlation_id="c", metadata={"x": 1}))
            store.append("a", Event("Went", {"n": 3}))
            expected = [(1, None, None), (2, "c", {"x": 1}), (3, None, None)]
            for events in (store.load("a"), list(store.read())):
                assert [(e.data["n"], e.correlation_id, e.metadata) for e in events] == expected
            store.by_entity.flush()
            assert store.load("a", after=1, limit=1)[0].metadata == {"x": 1}


def test_a_stream_that_must_exist(store: EventStore) -> None:
    with pytest.raises(VersionConflict, match="expected to have events"):
        store.append("a", Event("Went"), expected=EXISTS)
    store.append("a", [Event("Went"), Event("Came")], expected=NEW)
    assert store.append("a", Event("Went"), expected=EXISTS).versions == {"a": 3}
    with pytest.raises(VersionConflict):
        store.append("a", Event("Went"), expected=NEW)


@settings(max_examples=25, deadline=None)
@given(
    after=st.integers(0, 12),
    upto=st.none() | st.integers(0, 12),
    limit=st.none() | st.integers(0, 12),
    flushed=st.integers(0, 10),
)
def test_reading_an_entity_backwards(
    tmp_path_factory: pytest.TempPathFactory,
    after: int,
    upto: int | None,
    limit: int | None,
    flushed: int,
) -> None:
    directory = tmp_path_factory.mktemp("log")
    with hr.open_log(f"file:{directory}", durability="os") as log, open_store(log, "s") as store:
        for number in range(1, 11):
            store.commit([Change(name, [Event("E", {"n": number})]) for name in ("a", "b", "c")])
            if number == flushed:
                store.by_entity.flush()
        every = [n for n in range(1, 11) if n > after and (upto is None or n <= upto)]
        forwards = numbers(store.load("b", after=after, upto=upto, limit=limit))
        backwards = numbers(store.load("b", after=after, upto=upto, limit=limit, backwards=True))
        assert forwards == every[:limit]
        assert backwards == every[::-1][:limit]
        assert (
            numbers(store.read("b", backwards=True, limit=limit)) == list(range(10, 0, -1))[:limit]
        )
        whole = numbers(store.read(after, upto))
        assert numbers(store.read(after, upto, backwards=True, limit=limit)) == whole[::-1][:limit]


def test_the_stream_of_a_pipeline_has_metadata_if_it_asks() -> None:
    plain = stream(hr.Pipeline("a"), "bank")
    assert "metadata" not in plain.schema.names
    assert stream(hr.Pipeline("b"), "bank", metadata=True).schema.names[-1] == "metadata"


def test_the_position_has_a_format(store: EventStore) -> None:
    store.subscribe("reader", start=3)
    stored = store.log.note("events.bank.subscription.reader")
    assert stored is not None
    assert json.loads(stored) == {"format": 1, "position": 3}
