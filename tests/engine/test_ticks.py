"""Ticks: recorded, read again, cut by rows and by append time, never through a commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.durations import to_time_us
from headrace.engine import ticks as ticks_module
from headrace.engine.ticks import Tick, TickJournal, first_tick, next_ticks
from headrace.log.file.log import FileLog
from headrace.log.file.store import now_us


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    with FileLog.open(tmp_path / "log", durability="os") as log:
        yield log


def record(log: FileLog, journal: TickJournal, ticks: list[Tick]) -> None:
    with log.transaction("ticks") as tx:
        journal.record(tx, ticks)
    journal.refresh()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b"]),
            st.dictionaries(st.integers(0, 2), st.integers(0, 5), min_size=1, max_size=3),
            max_size=2,
        ),
        min_size=1,
        max_size=150,
    )
)
def test_recorded_ticks_are_read_as_they_were_cut(
    tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, dict[int, int]]]
) -> None:
    with FileLog.open(tmp_path_factory.mktemp("ticks") / "log", durability="os") as log:
        journal = TickJournal.open(log, "p")
        ends: dict[str, dict[int, int]] = {"a": {0: 0}}
        ticks = []
        for number, step in enumerate(steps, 1):
            ends = {
                topic: {
                    **ends.get(topic, {}),
                    **{
                        p: ends.get(topic, {}).get(p, 0) + more
                        for p, more in step.get(topic, {}).items()
                    },
                }
                for topic in {**ends, **step}
            }
            ticks.append(Tick(number, number * 10, ends))
        half = len(ticks) // 2
        record(log, journal, ticks[:half])
        record(log, journal, ticks[half:])
        again = TickJournal.open(log, "p")
        assert list(again.between(0, len(ticks))) == ticks == list(journal.between(0, len(ticks)))
        assert again.at(half or 1) == ticks[(half or 1) - 1]
        assert list(again.between(1, 3)) == ticks[1:3]


def fill(log: FileLog, topic: str, commits: list[int]) -> None:
    with log.producer(topic) as producer:
        for rows in commits:
            producer.append([{"a": 1}] * rows)


def test_no_tick_is_cut_when_nothing_is_new_unless_time_must_move(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT")
    start = first_tick({"t": {0: 0}})
    assert next_ticks(log, ["t"], start, now_us()) == []
    (forced,) = next_ticks(log, ["t"], start, now_us(), forced=True)
    assert (forced.number, forced.ends) == (1, {"t": {0: 0}})


def test_a_backlog_is_cut_by_append_time_and_never_through_a_commit(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT", partitions=2)
    log.create_topic("u", "a BIGINT")
    for turn in range(12):
        fill(log, "t", [7])
        fill(log, "u", [3 + turn % 2])
    start = first_tick({"t": {0: 0, 1: 0}, "u": {0: 0}})
    ticks = next_ticks(log, ["t", "u"], start, now_us(), max_rows=25)
    assert ticks[-1].ends == dict(log.snapshot(["t", "u"]))
    assert [tick.number for tick in ticks] == list(range(1, len(ticks) + 1))
    times = [tick.time_us for tick in ticks]
    assert times == sorted(times)
    whole = {
        sum(offsets.values())
        for offsets in ({p: tick.end("t", p) for p in (0, 1)} for tick in ticks)
    }
    assert all(rows % 7 == 0 for rows in whole)
    before = start
    for tick in ticks:
        rows = sum(tick.end(t, p) - before.end(t, p) for t, p in (("t", 0), ("t", 1), ("u", 0)))
        assert 0 < rows <= 25
        before = tick
    for tick in ticks[:-1]:  # all that was appended by the tick's time is in it, and nothing later
        assert log.offsets_at("t", (tick.time_us + 1) / 1e6) == dict(tick.ends["t"])


def test_a_commit_larger_than_the_bound_is_taken_whole(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT")
    fill(log, "t", [5, 100, 5])
    ticks = next_ticks(log, ["t"], first_tick({"t": {0: 0}}), now_us(), max_rows=20)
    assert [tick.end("t", 0) for tick in ticks] == [5, 105, 110]


def test_a_tick_s_time_never_goes_back(log: FileLog) -> None:
    log.create_topic("t", "a BIGINT")
    fill(log, "t", [1])
    later = to_time_us("2040-01-01")
    (tick,) = next_ticks(log, ["t"], Tick(4, later, {"t": {0: 0}}), now_us())
    assert (tick.number, tick.time_us) == (5, later)


def test_only_the_newest_ticks_are_at_hand_and_older_ones_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks_module, "MAX_CACHED_TICKS", 100)
    log = FileLog.open(tmp_path)
    journal = TickJournal.open(log, "shop")
    everything = [
        Tick(
            number,
            number * 10,
            {"a": {0: number, 1: number // 100}, "b": {0: 7 * (number // 1000)}},
        )
        for number in range(3_000)
    ]
    for first in range(0, 3_000, 150):
        with log.transaction("writer") as tx:
            journal.record(tx, everything[first : first + 150])
        journal.refresh()
    assert len(journal._ticks) <= 200
    for opened in (journal, TickJournal.open(log, "shop")):
        assert opened.first == everything[0]
        assert opened.last == everything[-1]
        for after, up_to in (
            (-1, 5),
            (0, 2_999),
            (62, 66),
            (1_500, 1_700),
            (2_850, 2_990),
            (2_999, 3_005),
        ):
            assert list(opened.between(after, up_to)) == everything[after + 1 : up_to + 1]
        assert opened.at(1_234) == everything[1_234]
        assert opened.at(3_000) is None
