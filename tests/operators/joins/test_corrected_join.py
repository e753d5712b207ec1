"""Answers that are corrected, and a table's history, against a list of all versions."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.operators.changelog import check_ticks, fold
from headrace.operators.joins import row_store
from headrace.operators.joins.sides import Side
from headrace.operators.joins.timeline import HistoryKernel
from headrace.operators.joins.versioned_join import CorrectedJoin
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, Row, changed
from tests.operators.joins.join_driver import (
    Drive,
    Track,
    check_all_ways,
    cuts,
    in_key_order,
    restored,
    tracks,
)
from tests.operators.joins.versions_oracle import (
    CORRECTED_COLUMNS,
    STREAM,
    TABLE,
    Known,
    horizon,
    moment,
    row_history,
    stored,
    version_history,
)
from tests.short_forms import examples


def join(how: str, history: int) -> CorrectedJoin:
    return restored(
        CorrectedJoin("j", STREAM, TABLE, CORRECTED_COLUMNS, history_us=history, how=how)
    )


class Oracle:
    """All rows that may be corrected, with what was emitted of each; every tick, every row is
    matched anew.
    """

    def __init__(self, how: str, history: int, watermarks: tuple[Track, Track]) -> None:
        self.how, self.history, self.watermarks = how, history, watermarks
        self.known, self.rows, self.emitted = Known(history), list[Row](), dict[int, Row | None]()
        self.counts = {"late_versions": 0, "too_old": 0}

    def tick(self, number: int, rows: list[Row], changes: list[Row]) -> list[Row]:
        before, after = (horizon(self.watermarks, at, self.history) for at in (number - 1, number))
        self.counts["late_versions"] += sum(
            version.at < before for version in self.known.take_in(number, changes, before)
        )
        fresh = [row for row in rows if row["t"] >= before]
        self.counts["too_old"] += len(rows) - len(fresh)
        self.rows = sorted([*self.rows, *fresh], key=lambda row: row["t"])
        emitted: list[Row] = []
        for row in self.rows:
            answer = self._answer(row)
            if answer != self.emitted.get(row["n"]):
                emitted += changed(self.emitted.get(row["n"]), answer)
            self.emitted[row["n"]] = answer
        self.rows = [row for row in self.rows if row["t"] >= after and row["k"] is not None]
        self.known.forget(after)
        return [
            {**row, "_tick": number}
            for row in in_key_order(emitted, [row["k"] for row in emitted], pa.int64())
        ]

    def _answer(self, row: Row) -> Row | None:
        version = self.known.valid(row["k"], row["t"])
        value = version and version.value
        if value is None and self.how == "inner":
            return None
        return {"n": row["n"], "k": row["k"], "t": moment(row["t"]), "v": value}


def check(
    stream: History,
    table: History,
    watermarks: tuple[Track, Track],
    how: str,
    history: int,
    cut: list[int],
) -> None:
    oracle = Oracle(how, history, watermarks)
    expected = [
        row
        for number, each in enumerate(zip(stream.ticks, table.ticks, strict=True))
        for row in oracle.tick(number, *each)
    ]
    drive = Drive([stream, table], watermarks)
    state = check_all_ways(
        drive, lambda: join(how, history), expected, ("k", pa.int64()), [["k"], ["k"]], cut
    )
    assert stored(state, 0) == oracle.known.count
    assert stored(state, 1) == len(oracle.rows), (
        "rows are kept as long as they may be corrected, and no longer"
    )
    kernel = join(how, history)
    result = kernel.step_timed(
        MemoryState(),
        [each.table(0, drive.ticks) for each in drive.inputs],
        [each.watermarks(0, drive.ticks) for each in watermarks],
    )
    assert kernel.counts == oracle.counts
    check_ticks(result, kernel.key)
    assert {key[0]: row for key, row in fold(result, kernel.key).items()} == {
        n: row for n, row in oracle.emitted.items() if row is not None
    }


@pytest.mark.parametrize("how", ["inner", "left"])
@given(data=st.data())
@settings(max_examples=examples(70))
def test_rows_are_answered_at_once_and_corrected(how: str, data: st.DataObject) -> None:
    ticks = data.draw(st.integers(1, 6))
    watermarks = data.draw(tracks(ticks)), data.draw(tracks(ticks))
    check(
        data.draw(row_history(ticks)),
        data.draw(version_history(ticks)),
        watermarks,
        how,
        data.draw(st.integers(0, 8)),
        data.draw(cuts(ticks)),
    )


@given(data=st.data())
@settings(max_examples=examples(40))
def test_many_rows_and_versions_of_a_key_in_chunks(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_store, "MAX_CHUNK_ROWS", 2)
        patch.setattr(row_store, "_SPLIT_CHUNK_ROWS", 1)
        ticks = data.draw(st.integers(4, 9))
        watermarks = data.draw(tracks(ticks, max_step=2)), data.draw(tracks(ticks, max_step=2))
        stream, table = (
            data.draw(row_history(ticks, keys=0)),
            data.draw(version_history(ticks, keys=0)),
        )
        check(
            stream, table, watermarks, "inner", data.draw(st.integers(0, 8)), list(range(1, ticks))
        )


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(InputError, match="lacks 'n'"):
        CorrectedJoin("j", STREAM, TABLE, CORRECTED_COLUMNS[1:], history_us=1)
    with pytest.raises(InputError, match="lacks what identifies a row"):
        CorrectedJoin(
            "j", Side(STREAM.schema, ("k",), time="t"), TABLE, CORRECTED_COLUMNS, history_us=1
        )
    assert join("inner", 5).lateness_us == 5


# The history


class HistoryOracle:
    """Moments of each key, and for each what was emitted of it."""

    def __init__(self, history: int, clock: Track) -> None:
        self.history, self.clock, self.known = history, clock, Known(history)
        self.emitted: dict[tuple[int, int], Row] = {}
        self.late = 0

    def tick(self, number: int, changes: list[Row]) -> list[Row]:
        before, after = (horizon((self.clock,), at, self.history) for at in (number - 1, number))
        were = list(self.known.versions)
        for version in self.known.take_in(number, changes, before):
            if any(each.key == version.key and version.at < each.at <= before for each in were):
                self.known.versions.remove(version)
                self.late += 1
        emitted: list[Row] = []
        version_keys = sorted({(version.key, version.at) for version in self.known.versions})
        for version_key in version_keys:
            fresh = self._row(version_key, version_keys)
            if fresh != self.emitted.get(version_key):
                emitted += changed(self.emitted.get(version_key), fresh)
            self.emitted.pop(version_key, None)
            self.emitted |= {version_key: fresh} if fresh else {}
        self._forget(after)
        return [{**row, "_tick": number} for row in emitted]

    def _row(self, version_key: tuple[int, int], version_keys: list[tuple[int, int]]) -> Row | None:
        value = [
            version.value
            for version in self.known.versions
            if (version.key, version.at) == version_key
        ][-1]
        ends = min(
            (at for key, at in version_keys if key == version_key[0] and at > version_key[1]),
            default=None,
        )
        return (
            None
            if value is None
            else {
                "k": version_key[0],
                "v": value,
                "since": moment(version_key[1]),
                "valid_to": moment(ends),
            }
        )

    def _forget(self, known_from: int) -> None:
        for key in {version.key for version in self.known.versions}:
            base = self.known.valid(key, known_from)
            if base is not None:
                self.known.versions = [
                    each for each in self.known.versions if each.key != key or each.at >= base.at
                ]


@given(data=st.data())
@settings(max_examples=examples(100))
def test_each_version_with_when_it_was_valid(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(row_store, "MAX_CHUNK_ROWS", 2)
            patch.setattr(row_store, "_SPLIT_CHUNK_ROWS", 1)
        ticks = data.draw(st.integers(1, 9))
        clock, history = data.draw(tracks(ticks)), data.draw(st.integers(0, 8))
        table = data.draw(version_history(ticks, keys=1))
        oracle = HistoryOracle(history, clock)
        expected = [
            row
            for number, changes in enumerate(table.ticks)
            for row in oracle.tick(number, changes)
        ]

        def make() -> HistoryKernel:
            return restored(HistoryKernel("h", TABLE, history_us=history))

        check_all_ways(
            Drive([table], [clock]),
            make,
            expected,
            ("k", pa.int64()),
            [["k"]],
            data.draw(cuts(ticks)),
        )
        kernel = make()
        result = kernel.step_timed(
            MemoryState(), [table.table(0, ticks)], [clock.watermarks(0, ticks)]
        )
        assert kernel.counts == {"late_versions": oracle.late}
        check_ticks(result, kernel.key)
        assert sorted(map(repr, fold(result, kernel.key).values())) == sorted(
            map(repr, oracle.emitted.values())
        )


def test_a_version_between_two_ends_the_one_before_it() -> None:
    kernel = HistoryKernel("h", TABLE, history_us=100)
    changes = pa.table(
        {
            "k": [1, 1, 1],
            "v": [10, 30, 20],
            "since": pa.array([1, 30, 20], TABLE.schema.field("since").type),
            "_change_type": ["insert", "update_postimage", "update_postimage"],
            "_tick": [0, 0, 1],
        }
    )
    ticks = Track([5, 6], [5, 6]).watermarks(0, 2)
    emitted = kernel.step_timed(MemoryState(), [changes], [ticks]).to_pylist()
    assert [
        (row["v"], number(row["since"]), number(row["valid_to"]), row["_change_type"])
        for row in emitted
    ] == [
        (10, 1, 30, "insert"),
        (30, 30, None, "insert"),
        (10, 1, 30, "update_preimage"),
        (10, 1, 20, "update_postimage"),
        (20, 20, 30, "insert"),
    ]


def number(time: Any) -> int | None:
    return None if time is None else time.microsecond
