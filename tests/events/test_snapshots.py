"""Snapshots keep the types of states, or are not stored; they never fail a command."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest

import headrace as hr
from headrace.errors import BadEvent, ConfigurationError
from headrace.events import Decider, EventStore, Handler, open_store
from tests.events.phases import PHASES, Empty, Full, Open, Paid


def handler_for(
    store: EventStore, evolve: Callable[[Any, Any], Any], initial: Any, **options: Any
) -> Handler[Any]:
    decider = Decider[Any](
        "typed",
        initial,
        lambda amount, _state: [Paid(Decimal(amount))],
        evolve,
        events=(Paid,),
        snapshot_every=5,
        **options,
    )
    return Handler(store, decider)


def test_a_state_class_for_each_phase_failed_in_another_process(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    with hr.open_log(f"file:{directory}", durability="os") as log, open_store(log, "bank") as store:
        phases = Handler(store, PHASES)
        for _ in range(100):
            phases.handle("a", Decimal("9.50"))
        store.by_entity.flush()  # the snapshot is on disk
    other = subprocess.run(
        [sys.executable, "-m", "tests.events.phases", str(directory)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == "Open(balance=Decimal('950.50')) 0\n"


def test_a_phase_that_is_not_declared_is_found_by_its_name(store: EventStore) -> None:
    def evolve(state, event):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return (
            Full(state.balance + event.amount)
            if isinstance(state, Open | Full)
            else Open(event.amount)
        )

    for _ in range(12):
        handler_for(store, evolve, Empty()).handle("a", "1.50")
    assert handler_for(store, evolve, Empty()).state("a") == Full(Decimal("18.00"))
    snapshot = snapshot_of(store, "typed")
    assert (snapshot["version"], snapshot["state"]["$is"]) == (10, "Full")


def snapshot_of(store: EventStore, decider: str, entity: str = "a") -> dict[str, Any]:
    with store.by_entity.look() as look:
        content = look.snapshot(entity, decider)
    assert content is not None
    return dict(json.loads(content))


def count(state: Any, event: Paid) -> Any:
    return event.amount if not state else state + event.amount


def by_day(state: Any, event: Paid) -> Any:
    return {**state, date(2026, 3, 1 + len(state)): event.amount}


def pairs(state: Any, event: Paid) -> Any:
    return (*state, (event.amount, datetime(2026, 3, 1, tzinfo=ZoneInfo("Europe/Berlin"))))


@pytest.mark.parametrize(
    ("initial", "evolve"), [(None, count), (0, count), ({}, by_day), ((), pairs)]
)
def test_decimals_turned_into_texts_after_a_plain_initial_state(
    store: EventStore, initial: Any, evolve: Callable[[Any, Any], Any]
) -> None:
    live = handler_for(store, evolve, initial)
    for _ in range(5):
        live.handle("a", "9.50")
    fresh = handler_for(store, evolve, initial)  # starts from the snapshot
    assert snapshot_of(store, "typed")["version"] == 5
    assert repr(fresh.state("a")) == repr(live.state("a"))
    assert fresh.state("a") == live.state("a")
    assert fresh.snapshot_failures == 0


def test_a_state_that_is_no_json_raised_after_its_event_was_stored(
    store: EventStore, caplog: pytest.LogCaptureFixture
) -> None:
    def evolve(state: Any, event: Paid) -> Any:
        return object()

    handler = handler_for(store, evolve, None)
    with caplog.at_level(logging.WARNING, logger="headrace.events"):
        for number in range(1, 11):
            assert handler.handle("a", "1", id=f"c{number}").version == number
    assert handler.snapshot_failures == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # logged once
    assert "A object cannot be stored" in caplog.text


def test_a_snapshot_that_cannot_be_read_is_folded_instead(store: EventStore) -> None:
    handler = handler_for(store, count, 0)
    for _ in range(5):
        handler.handle("a", "1")
    store.by_entity.put_snapshot("a", "typed", b'{"format": 2, "form": 1, "version": 5}')
    fresh = handler_for(store, count, 0)
    assert (fresh.state("a"), fresh.snapshot_failures) == (Decimal(5), 1)


def test_snapshots_of_the_first_format_open_where_they_kept_types(store: EventStore) -> None:
    @dataclass(frozen=True)
    class Account:
        balance: Decimal = Decimal(0)

    def evolve(state: Any, event: Paid) -> Any:
        return Account(state.balance + event.amount)

    def by_class(state: Empty | Open, event: Paid) -> Empty | Open:
        return Open(event.amount)

    handler = handler_for(store, evolve, Account())
    for _ in range(3):
        handler.handle("a", "1")
    first_format = {"state_version": 1, "version": 3, "state": {"balance": "100.00"}}
    store.by_entity.put_snapshot("a", "typed", json.dumps(first_format).encode())
    assert handler_for(store, evolve, Account()).state("a") == Account(Decimal("100.00"))
    # Of one phase of several, nobody knows which: it is folded.
    assert handler_for(store, by_class, Empty()).state("a") == Open(Decimal(1))
    assert handler_for(store, count, 0).state("a") == Decimal(3)


def test_state_upcasters_bring_a_snapshot_to_the_current_form(store: EventStore) -> None:
    handler = handler_for(store, count, 0)
    for _ in range(5):
        handler.handle("a", "1")

    def doubled(state: Any, event: Paid) -> tuple[Decimal, str]:
        return (state[0] + event.amount, state[1])

    newer = handler_for(
        store,
        doubled,
        (Decimal(0), ""),
        state_version=2,
        state_upcasters={1: lambda stored: [stored["value"], "from 1"]},
    )
    assert newer.state("a") == (Decimal(5), "from 1")
    assert handler_for(store, doubled, (Decimal(0), ""), state_version=3).state("a") == (
        Decimal(5),
        "",
    )


class Point(NamedTuple):
    x: Decimal
    at: date


class Opaque:
    pass


@dataclass(frozen=True)
class Holder:
    thing: Opaque


@pytest.mark.parametrize("hint", [Opaque, list[Opaque], Mapping[str, Holder], Point | Opaque])
def test_a_type_of_state_that_cannot_be_stored_is_refused_at_declaration(hint: Any) -> None:
    with pytest.raises(ConfigurationError, match="Opaque is no type that can be stored"):
        Decider("bad", None, decide_nothing, count, events=(Paid,), state=hint)


def test_an_initial_state_that_cannot_be_stored_is_refused_at_declaration() -> None:
    with pytest.raises(ConfigurationError, match="initial state of the decider 'bad'"):
        Decider("bad", [Opaque()], decide_nothing, count, events=(Paid,))
    Decider("good", [Opaque()], decide_nothing, count, events=(Paid,), snapshot_every=None)


def decide_nothing(_command: Any, _state: Any) -> list[Any]:
    return []


def test_an_event_class_that_cannot_be_stored_is_refused_at_declaration() -> None:
    with pytest.raises(
        ConfigurationError, match=r"the event Holder\.Holder\.thing: Opaque is no type"
    ):
        Decider("bad", None, decide_nothing, count, events=(Holder,))


@dataclass(frozen=True)
class Cash:
    amount: Decimal


@dataclass(frozen=True)
class Card:
    amount: Decimal
    number: str = ""


@dataclass(frozen=True)
class Bought:
    by: Cash | Card
    parts: list[Cash | Card]
    where: Point
    price: Decimal | str
    extra: dict[str, Any]


def test_events_with_unions_came_back_as_dicts(store: EventStore) -> None:
    event = Bought(
        Card(Decimal("1.50"), "77"),
        [Cash(Decimal(2)), Card(Decimal(3))],
        Point(Decimal("0.5"), date(2026, 3, 1)),
        Decimal("9.50"),
        {"at": datetime(2026, 3, 1, tzinfo=UTC), "of": (1, Decimal(2))},
    )
    seen: list[Any] = []

    def evolve(state: int, stored: Bought) -> int:
        seen.append(stored)
        return state + 1

    decider = Decider("shop", 0, lambda command, _state: [command], evolve, events=(Bought,))
    Handler(store, decider).handle("a", event)
    Handler(store, decider).state("a")
    assert seen == [event, event]


def test_an_event_that_would_not_be_read_back_is_refused_before_it_is_stored(
    store: EventStore,
) -> None:
    decider = Decider("d", 0, lambda command, _state: [command], count, events=(Paid,))
    with pytest.raises(BadEvent, match="'many' is a str, where Decimal was declared"):
        Handler(store, decider).handle("a", Paid("many"))  # type: ignore[arg-type]
    assert store.version("a") == 0
    # What can be coerced is folded as it will be read again.
    state: object = Handler(store, decider).handle("a", Paid(5)).state  # type: ignore[arg-type]
    assert type(state) is Decimal
