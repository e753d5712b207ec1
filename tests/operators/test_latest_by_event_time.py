"""Of rows with one key the latest, behind a join that corrects, against a dictionary of all rows
that were emitted.
"""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar import row_codec
from headrace.errors import NewerFormat
from headrace.operators.changelog import check_ticks, fold
from headrace.operators.joins.versioned_join import CorrectedJoin
from headrace.operators.latest_rows import NewestKernel
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, Row, changed
from tests.operators.joins.join_driver import Drive, cuts, restored, tracks
from tests.operators.joins.versions_oracle import (
    CORRECTED_COLUMNS,
    STREAM,
    TABLE,
    moment,
    row_history,
    version_history,
)
from tests.short_forms import examples

SCHEMA = pa.schema([*STREAM.schema, ("v", pa.int64())])


def newest() -> NewestKernel:
    return restored(NewestKernel("n", SCHEMA, ("n",), own=STREAM.schema.names, time="t"))


@st.composite
def emitted_by_a_join(draw: st.DrawFn, ticks: int) -> list[list[Row]]:
    """What a join emits, tick by tick, of rows of which several have the same key, in one tick or
    in several, under one join key or several.
    """
    stream = draw(row_history(ticks, keys=1))
    stream = History(
        stream.schema,
        [[{**row, "n": draw(st.integers(0, 2))} for row in rows] for rows in stream.ticks],
        is_table=False,
    )
    drive = Drive(
        [stream, draw(version_history(ticks, keys=1))], [draw(tracks(ticks)), draw(tracks(ticks))]
    )
    how, history = draw(st.sampled_from(["inner", "left"])), draw(st.integers(0, 12))
    emitted, _ = drive.run(
        lambda: CorrectedJoin("j", STREAM, TABLE, CORRECTED_COLUMNS, history_us=history, how=how)
    )
    return [[row for row in emitted if row["_tick"] == tick] for tick in range(ticks)]


def identity(row: Row) -> tuple[object, bytes]:
    own = pa.StructArray.from_arrays(
        [pa.array([row[field.name]], field.type) for field in STREAM.schema],
        fields=list(STREAM.schema),
    )
    return row["t"], row_codec.encode(own)[0]


def oracle(ticks: list[list[Row]]) -> list[Row]:
    """Of each key the latest row that was emitted, and what was emitted of it last."""
    latest: dict[int, tuple[object, bytes]] = {}
    shown: dict[int, Row] = {}
    emitted: list[Row] = []
    for tick, changes in enumerate(ticks):
        before = dict(shown)
        for row in changes:
            if row["_change_type"] in {"insert", "update_postimage"}:
                latest[row["n"]] = max(latest.get(row["n"], identity(row)), identity(row))
        for row in changes:
            if row["_change_type"] == "update_preimage" or identity(row) != latest[row["n"]]:
                continue
            shown.pop(row["n"], None)
            shown |= (
                {}
                if row["_change_type"] == "delete"
                else {row["n"]: {name: row[name] for name in SCHEMA.names}}
            )
        for key in sorted({*before, *shown}):
            if before.get(key) != shown.get(key):
                emitted += [
                    {**row, "_tick": tick} for row in changed(before.get(key), shown.get(key))
                ]
    return emitted


@given(data=st.data())
@settings(max_examples=examples(150))
def test_the_latest_row_of_each_key_is_shown_as_it_was_emitted_last(data: st.DataObject) -> None:
    ticks = data.draw(st.integers(1, 7))
    emitted = data.draw(emitted_by_a_join(ticks))
    for cut in ([], list(range(1, ticks)), data.draw(cuts(ticks))):
        state, result = MemoryState(), list[Row]()
        for first, stop in zip([0, *sorted(set(cut))], [*sorted(set(cut)), ticks], strict=True):
            rows = [row for each in emitted[first:stop] for row in each]
            out = newest().step(
                state,
                pa.Table.from_pylist(rows, newest().output.append(pa.field("_tick", pa.int64()))),
            )
            out.validate(full=True)
            result += out.to_pylist()
        assert result == oracle(emitted)
    changelog = pa.Table.from_pylist(result, newest().output.append(pa.field("_tick", pa.int64())))
    check_ticks(changelog, ("n",))
    fold(changelog, ("n",))


def rows(*changes: tuple[int, int, int, int | None, str, int]) -> pa.Table:
    names = ("n", "k", "t", "v", "_change_type", "_tick")
    timer_list_entries = [
        {**dict(zip(names, change, strict=True)), "t": moment(change[2])} for change in changes
    ]
    return pa.Table.from_pylist(
        timer_list_entries, newest().output.append(pa.field("_tick", pa.int64()))
    )


def test_an_earlier_row_that_is_corrected_later_takes_nothing_away() -> None:
    state = MemoryState()
    newest().step(state, rows((1, 7, 10, None, "insert", 1), (1, 8, 20, None, "insert", 1)))
    assert (
        newest()
        .step(
            state,
            rows((1, 7, 10, None, "update_preimage", 2), (1, 7, 10, 5, "update_postimage", 2)),
        )
        .num_rows
        == 0
    )
    assert newest().step(state, rows((1, 7, 10, 5, "delete", 3))).num_rows == 0
    emitted = newest().step(state, rows((1, 8, 20, None, "delete", 4), (1, 7, 10, 6, "insert", 5)))
    assert [(row["t"], row["_change_type"], row["_tick"]) for row in emitted.to_pylist()] == [
        (moment(20), "delete", 4)
    ]
    kept = newest().describe(pa.array([]), pa.array(list(state.values.values()), pa.binary()))
    assert [(row["k"], row["_taken_back"]) for row in kept.to_pylist()] == [(8, True)]


def test_a_state_of_a_newer_version_is_refused() -> None:
    state = MemoryState()
    newest().step(state, rows((1, 7, 10, None, "insert", 1)))
    state.values = {name: b"\x02" + value[1:] for name, value in state.values.items()}
    with pytest.raises(NewerFormat, match="newer Headrace"):
        newest().step(state, rows((1, 7, 10, None, "delete", 2)))
