"""Transaction ids that are not used are forgotten, and their old owners stay fenced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import TransactionFenced
from headrace.log.api import Log
from headrace.log.file.log import FileLog
from headrace.log.file.state import State

DAY_S = 24 * 3600


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("t", "n BIGINT")
        yield opened


def transactions(log: Log) -> set[str]:
    assert isinstance(log, FileLog)
    return set(log.store.view().transactions)


def pass_days(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Set the log's clock so many days ahead of the real one."""
    monkeypatch.setattr(
        "headrace.log.file.store.LogClock.now_us",
        lambda _clock: time.time_ns() // 1000 + int(days * DAY_S * 1_000_000),
    )


def test_transaction_ids_were_never_forgotten(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = log.transaction("idle")
    busy = log.transaction("busy")
    for days in (10, 20, 30, 40):
        pass_days(monkeypatch, days)
        busy.append("t", {"n": 1})
        busy.commit()
        busy = busy.next()
    log.maintain()
    assert transactions(log) == {"busy"}, "one that commits stays, without being begun again"
    assert transactions(log) == set(State.load(_dump(log)).transactions)
    idle.append("t", {"n": 2})
    with pytest.raises(TransactionFenced, match="not known any more"):
        idle.commit()


def test_an_owner_from_before_its_id_was_forgotten_stays_fenced(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = log.transaction("job")
    pass_days(monkeypatch, 40)
    log.maintain()
    log.create_topic("u", "n BIGINT")
    log.maintain()
    assert transactions(log) == set()
    for _ in range(3):
        with log.transaction("job") as tx:
            tx.append("t", {"n": 1})
        zombie = zombie.next()
        zombie.append("t", {"n": 2})
        with pytest.raises(TransactionFenced, match="newer owner"):
            zombie.commit()


def test_a_wall_clock_that_jumped_ended_a_transaction(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = log.transaction("job", timeout="1 minute")
    pass_days(monkeypatch, 0.5)
    tx.append("t", {"n": 1})
    tx.commit()
    assert len(log.read("t").to_pylist()) == 1


def _dump(log: Log) -> dict[str, object]:
    assert isinstance(log, FileLog)
    return log.store.view().dump()
