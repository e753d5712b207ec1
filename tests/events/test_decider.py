"""Handling commands: retries, refusals, repeated commands, snapshots, upcasters, states as of then,
and errors that name what is wrong.
"""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, ClassVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import (
    BadEvent,
    CommandRefused,
    ConfigurationError,
    DeciderFailed,
    EventIdConflict,
    InputError,
    UnknownEvent,
)
from headrace.events import Codec, Event, EventStore, Handler
from headrace.events.event import RecordedEvent
from tests.events.totals import TOTALS, Added, Total, evolve
from tests.short_forms import examples


def test_a_command_is_decided_stored_and_answered(store: EventStore) -> None:
    handler = Handler(store, TOTALS)
    answer = handler.handle("a", 2)
    assert (answer.state, answer.version, answer.events) == (Total(4, 2), 2, (Added(2), Added(2)))
    assert str(answer.position) == "bank:0:2"
    nothing = handler.handle("a", 3)
    assert (nothing.events, nothing.version, str(nothing.position)) == ((), 2, "bank:0:2")


def test_a_refused_command_and_a_decider_that_raises_leave_no_event(store: EventStore) -> None:
    handler = Handler(store, TOTALS)
    with pytest.raises(CommandRefused, match="less than nothing"):
        handler.handle("a", -1)
    with pytest.raises(
        DeciderFailed,
        match=(
            r"'total' failed at int for 'a': ZeroDivisionError\('bad luck'\); no event was stored"
        ),
    ):
        handler.handle("a", 13)
    assert store.end() == 0


def test_a_conflicting_writer_makes_the_command_decide_again(store: EventStore) -> None:
    seen = []

    def slow(command: int, total: Total) -> list[Added]:
        seen.append(total.sum)
        if len(seen) == 1:
            store.append("a", Event("Added", {"amount": 100}))
        return [Added(command)]

    handler = Handler(store, replace(TOTALS, decide=slow))
    answer = handler.handle("a", 1)
    assert (seen, answer.state) == ([0, 100], Total(101, 2))


def test_a_refusal_is_decided_on_the_newest_events(store: EventStore) -> None:
    def only_once(command: int, total: Total) -> list[Added]:
        if total.count:
            raise CommandRefused("no more")
        return [Added(command)]

    one, two = (Handler(store, replace(TOTALS, decide=only_once)) for _ in range(2))
    assert one.state("a") == two.state("a") == Total()
    one.handle("a", 1)
    with pytest.raises(CommandRefused):
        two.handle("a", 1)


def test_a_repeated_command_is_answered_as_before(store: EventStore) -> None:
    handler = Handler(store, TOTALS)
    first = handler.handle("a", 2, id="order-7")
    handler.handle("a", 1)
    for again in (
        handler.handle("a", 2, id="order-7"),
        Handler(store, TOTALS).handle("a", 2, id="order-7"),
    ):
        assert again.duplicate
        assert (again.events, str(again.position), again.version) == (
            first.events,
            str(first.position),
            3,
        )
    with pytest.raises(EventIdConflict, match="was used for 'a'"):
        handler.handle("b", 2, id="order-7")
    assert store.end() == 3


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    commands=st.lists(st.integers(0, 8), max_size=30),
    every=st.sampled_from([1, 2, 5, 100, None]),
    flush=st.booleans(),
    name=st.uuids(),
)
def test_snapshot_plus_tail_equals_the_full_fold(
    store: EventStore, commands: list[int], every: int | None, flush: bool, name: UUID
) -> None:
    entity = str(name)
    decider = replace(TOTALS, snapshot_every=every)
    handler = Handler(store, decider)
    for command in commands:
        handler.handle(entity, command)
    if flush:
        store.by_entity.flush()
    events = [Added(**event.data) for event in store.load(entity)]
    fold = [Total()]
    for event in events:
        fold.append(evolve(fold[-1], event))
    fresh = Handler(store, decider)
    assert fresh.state(entity) == handler.state(entity) == fold[-1]
    assert [fresh.state(entity, version=version) for version in range(len(events) + 1)] == fold


def test_a_snapshot_is_used_and_dropped_when_the_states_version_changes(store: EventStore) -> None:
    folded: list[int] = []

    def counted(total: Total, event: Added) -> Total:
        folded.append(event.amount)
        return evolve(total, event)

    def once(command: int, _total: Total) -> list[Added]:
        return [Added(command)]

    decider = replace(TOTALS, decide=once, evolve=counted)
    handler = Handler(store, decider)
    for _ in range(10):
        handler.handle("a", 1)
    store.by_entity.flush()
    folded.clear()
    assert Handler(store, decider).state("a") == Total(10, 10)
    assert len(folded) == 2  # behind the snapshot at version 8
    folded.clear()
    assert Handler(store, replace(decider, state_version=2)).state("a") == Total(10, 10)
    assert len(folded) == 10


def test_a_state_as_of_a_time(store: EventStore) -> None:
    handler = Handler(store, TOTALS)
    before = datetime.now(UTC)
    time.sleep(0.002)
    handler.handle("a", 1)
    (first,) = store.load("a")
    time.sleep(0.002)
    handler.handle("a", 1)
    assert [handler.state("a", at=at).sum for at in (before, first.time, datetime.now(UTC))] == [
        0,
        1,
        2,
    ]
    assert [type(event) for _, event in handler.history("a")] == [Added, Added]
    with pytest.raises(InputError, match="version from 0 on, or as of a time"):
        handler.state("a", version=1, at=before)


# Events as dataclasses


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Part:
    name: str
    price: Decimal | None = None


@dataclass(frozen=True)
class Everything:
    number: int
    price: Decimal
    at: datetime
    id: UUID
    colour: Colour
    raw: bytes
    parts: list[Part]
    pair: tuple[int, str]
    tags: frozenset[str]
    by_name: dict[str, Part]
    maybe: Part | None = None


def test_every_kind_of_value_comes_back(store: EventStore) -> None:
    codec = Codec([Everything])
    thing = Everything(
        1,
        Decimal("1.10"),
        datetime(2026, 1, 2, 3, tzinfo=UTC),
        UUID(int=7),
        Colour.RED,
        b"\x00\xff",
        [Part("a", Decimal(2)), Part("b")],
        (1, "x"),
        frozenset({"b", "a"}),
        {"p": Part("q")},
        Part("m", Decimal(1)),
    )
    store.append("a", codec.to_event(thing))
    assert [codec.from_recorded(event) for event in store.load("a")] == [thing]


@dataclass(frozen=True)
class Named:
    event_version: ClassVar[int] = 3
    first: str
    last: str


def stored(version: int, data: dict[str, Any], kind: str = "Named") -> RecordedEvent:
    return RecordedEvent("a", 0, 0, 5, kind, version, None, None, data)


def split(old: dict[str, Any]) -> dict[str, Any]:
    first, _, last = old["name"].partition(" ")
    return {"first": first, "last": last}


def test_old_versions_are_brought_up_to_date_step_by_step() -> None:
    codec = Codec(
        [Named], upcasters={("Named", 1): lambda old: {"name": old["n"]}, ("Named", 2): split}
    )
    assert (
        codec.from_recorded(stored(1, {"n": "Ada Lovelace"}))
        == codec.from_recorded(stored(3, {"first": "Ada", "last": "Lovelace"}))
        == Named("Ada", "Lovelace")
    )


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (stored(1, {}), r"upcaster from 1 is missing.*\n.*\('Named', 1\)"),
        (stored(2, {"nme": "x"}), "upcaster of 'Named' from version 2 failed"),
        (stored(4, {}), "of version 4; this code knows up to 3"),
        (stored(3, {"first": "x"}), "does not fit its class"),
        (
            stored(1, {}, "Nmed"),
            "event 5 of 'a' is a 'Nmed', which no class stands for: did you mean 'Named'",
        ),
    ],
)
def test_an_unknown_event_type_is_named(event: RecordedEvent, message: str) -> None:
    with pytest.raises(UnknownEvent, match=message):
        Codec([Named], upcasters={("Named", 2): split}).from_recorded(event)


def test_a_value_that_is_no_event_is_refused(store: EventStore) -> None:
    with pytest.raises(BadEvent, match="A str is no event"):
        Handler(store, replace(TOTALS, decide=lambda _command, _total: ["Added"])).handle("a", 1)
    with pytest.raises(BadEvent, match="A object cannot be stored"):
        Handler(store, replace(TOTALS, decide=lambda _command, _total: [Added(object())])).handle(  # type: ignore[arg-type]
            "a", 1
        )
    with pytest.raises(ConfigurationError, match="no dataclass"):
        Codec([int])
    with pytest.raises(InputError, match="snapshot_every"):
        replace(TOTALS, snapshot_every=0)
    assert store.end() == 0
