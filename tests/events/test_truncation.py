"""Events before a version are removed for good; versions go on, and nobody folds what is left as if
it were everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import InputError, PlanChanged, UnknownEntity
from headrace.events import Decider, Event, EventStore, Handler, open_store, stream, truncate
from headrace.testing.pipelines import PipelineTest


@dataclass(frozen=True)
class Deposited:
    amount: int


@dataclass(frozen=True)
class BalanceCarried:
    balance: int


def evolve(balance: int, event: Deposited | BalanceCarried) -> int:
    return event.balance if isinstance(event, BalanceCarried) else balance + event.amount


def decide(command: int | str, balance: int) -> list[Deposited | BalanceCarried]:
    return [BalanceCarried(balance) if isinstance(command, str) else Deposited(command)]


ACCOUNTS = Decider[int]("accounts", 0, decide, evolve, (Deposited, BalanceCarried))


def handler(store: EventStore) -> Handler[int]:
    return Handler(store, ACCOUNTS)


def filled(store: EventStore, count: int = 300) -> Handler[int]:
    """Two accounts: `a` has `count` deposits, its balance, and another deposit."""
    accounts = handler(store)
    for number in range(count):
        store.append("a", Event("Deposited", {"amount": number}, id=f"a{number}"))
        if not number % 50:
            accounts.handle("b", 1)
    accounts.handle("a", "carry")
    accounts.handle("a", 5)
    return accounts


def log_bytes(store: EventStore) -> int:
    root = store.log.store.root / "topics"
    return sum(file.stat().st_size for file in root.rglob("*.seg*"))


def test_events_before_a_version_are_gone_and_versions_go_on(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    balance = sum(range(300)) + 5
    with hr.open_log(address, durability="os") as log, open_store(log, "bank") as store:
        accounts = filled(store)
        before = log_bytes(store)
        assert accounts.truncate("a", before=301) == 300
        assert log_bytes(store) < before / 2
        assert [event.version for event in store.load("a")] == [301, 302]
        assert [event.version for event in store.load("b")] == [1, 2, 3, 4, 5, 6]
        assert [event.entity for event in store.read()] == ["b"] * 6 + ["a"] * 2
        assert accounts.state("a") == handler(store).state("a") == balance
        assert accounts.handle("a", 1).version == 303
        assert store.append("a", Event("Deposited", {"amount": 1}, id="a7")).versions == {"a": 304}
    with hr.open_log(address, durability="os") as log, open_store(log, "bank") as store:
        assert handler(store).versioned_state("a") == (304, balance + 2)
        assert log.verify() == []
        assert handler(store).truncate("a", before=301) == 0


def test_others_see_it_at_once(store: EventStore) -> None:
    filled(store, 20)
    with open_store(store.log, "bank") as other:
        known = handler(other)
        assert known.versioned_state("a") == (22, sum(range(20)) + 5)
        truncate(store, "a", before=21)
        assert [event.version for event in other.load("a")] == [21, 22]
        assert known.handle("a", 1).state == sum(range(20)) + 6


def test_a_state_of_before_is_refused(store: EventStore) -> None:
    accounts = filled(store, 20)
    truncate(store, "a", before=21)
    assert accounts.state("a", version=21) == sum(range(20))
    for version in (1, 20):
        with pytest.raises(InputError, match=f"as of version {version} is not known"):
            accounts.state("a", version=version)
    with pytest.raises(InputError, match="before version 21 were removed"):
        accounts.state("a", at=datetime.now(UTC) - timedelta(days=1))
    assert accounts.state("b", at=datetime.now(UTC) - timedelta(days=1)) == 0


def test_events_that_the_state_needs_stay(store: EventStore) -> None:
    accounts = filled(store, 20)
    with pytest.raises(InputError, match="'a' would be 5 instead of 195"):
        accounts.truncate("a", before=22)
    for version in (0, 23):
        with pytest.raises(InputError, match="at version 22, and its newest event stays"):
            accounts.truncate("a", before=version)
    with pytest.raises(UnknownEntity):
        truncate(store, "c", before=1)
    assert len(store.load("a")) == 22


@pytest.mark.parametrize("point", ["rolled", "sealed", "removed", "generation", "index"])
def test_a_truncation_that_was_interrupted_is_repeated(store: EventStore, point: str) -> None:
    accounts = filled(store, 20)

    def interrupt(name: str) -> None:
        if name == point:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        truncate(store, "a", before=21, step=interrupt)
    assert accounts.handle("a", 1).version == 23
    assert accounts.state("a") == sum(range(20)) + 6
    truncate(store, "a", before=21)
    assert [event.version for event in store.load("a")] == [21, 22, 23]
    assert handler(store).versioned_state("a") == (23, sum(range(20)) + 6)


def balances(*views: str) -> hr.Pipeline:
    pipeline = hr.Pipeline("balances")
    rows = stream(pipeline, "bank")
    for view in views:
        pipeline.view(view, rows.group_by("entity").aggregate(n=hr.agg.count()))
    return pipeline


def test_a_view_that_would_lack_the_events_is_refused(store: EventStore, tmp_path: Path) -> None:
    accounts = filled(store, 20)
    with PipelineTest(balances("n"), tmp_path / "run", log=store.log) as test:
        test.settle()
        truncate(store, "a", before=21)
        accounts.handle("a", 1)
        test.settle()
        assert {row["entity"]: row["n"] for row in test.view("n")} == {"a": 23, "b": 1}
        test.pipeline = balances("n", "more")
        with pytest.raises(PlanChanged, match="retention or compaction has taken rows of"):
            test.restart()
