"""The row store against lists: whatever comes and goes, in whatever portions, a key has what a
sorted list has.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.columnar.keys import key_groups
from headrace.errors import BugError, CorruptionError, NewerFormat
from headrace.operators.joins import row_store
from headrace.operators.joins.row_store import (
    HIGHEST,
    LOWEST,
    KeyedRowStore,
    RowStoreWriter,
    StoredRows,
)
from headrace.testing.kernels import MemoryState
from tests.short_forms import examples

KEYS = pa.array([b"a", b"b" * 500, b"c"], pa.binary())
Model = dict[tuple[int, int], list[tuple[int, int, bytes]]]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows make several chunks."""
    monkeypatch.setattr(row_store, "MAX_CHUNK_ROWS", 4)
    monkeypatch.setattr(row_store, "_SPLIT_CHUNK_ROWS", 2)


def opened(state: MemoryState, keys: pa.Array = KEYS) -> KeyedRowStore:
    return KeyedRowStore("s", state, keys, sections=2, registers=1)


def as_records(rows: list[tuple[int, int, int, bytes]]) -> StoredRows:
    keys, at, flags, values = zip(*rows, strict=True) if rows else ((), (), (), ())
    return StoredRows(
        np.array(keys, np.int64),
        np.array(at, np.int64),
        np.array(flags, np.uint8),
        pa.array(values, pa.large_binary()),
    )


def as_rows(records: StoredRows) -> list[tuple[int, int, int, bytes]]:
    return list(
        zip(
            records.keys.tolist(),
            records.sort_keys.tolist(),
            records.flags.tolist(),
            records.rows.to_pylist(),
            strict=True,
        )
    )


changes = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 1),
        st.integers(-12, 12),
        st.sampled_from(["come", "go", "flag"]),
        st.binary(max_size=3),
    ),
    max_size=12,
)


@given(st.lists(changes, max_size=12))
@settings(max_examples=examples(70), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_store_has_what_a_sorted_list_has(
    steps: list[list[tuple[int, int, int, str, bytes]]],
) -> None:
    state = MemoryState()
    model: Model = {(key, section): [] for key in range(3) for section in range(2)}
    for number, step in enumerate(steps):
        row_store = opened(state)
        writer = RowStoreWriter(row_store)
        for section in range(2):
            take_in(
                row_store, writer, model, section, [each for each in step if each[1] == section]
            )
        row_store.registers[0] = [number if model[key, 0] else HIGHEST for key in range(3)]
        writer.save()
        check(state, model, number)
    gone = [(key, section) for key in range(3) for section in range(2)]
    row_store = opened(state)
    writer = RowStoreWriter(row_store)
    for key, section in gone:
        model[key, section] = []
    for section in range(2):
        there = row_store.load_all(section)
        writer.replace(section, StoredRows.empty(), there.keys, there.sort_keys)
    writer.save()
    assert state.values == {}, "nothing is left of empty keys"


def take_in(
    row_store: KeyedRowStore,
    writer: RowStoreWriter,
    model: Model,
    section: int,
    step: list[tuple[int, int, int, str, bytes]],
) -> None:
    low, high = np.full(3, HIGHEST), np.full(3, LOWEST)
    for key, _, at, _, _ in step:
        low[key], high[key] = min(low[key], at), max(high[key], at)
    loaded = as_rows(row_store.load(section, low, high))
    for key in range(3):
        mine = model[key, section]
        assert [row[1:] for row in loaded if row[0] == key and low[key] <= row[1] <= high[key]] == [
            row for row in mine if low[key] <= row[0] <= high[key]
        ]
    for key, _, at, change, value in step:
        mine = model[key, section]
        there = [row for row in mine if row[0] == at]
        if change == "come":
            mine.append((at, 0, value))
            loaded.append((key, at, 0, value))
        elif change == "go" and there:
            mine.remove(there[0])
            loaded.remove((key, *there[0]))
        elif change == "flag" and there:
            mine[mine.index(there[0])] = (at, 1, there[0][2])
            loaded[loaded.index((key, *there[0]))] = (key, at, 1, there[0][2])
        mine.sort(key=lambda row: row[0])
    loaded.sort(key=lambda row: row[:2])
    writer.replace(
        section,
        as_records(loaded),
        np.array([each[0] for each in step], np.int64),
        np.array([each[2] for each in step], np.int64),
    )


def check(state: MemoryState, model: Model, mark: int) -> None:
    row_store = opened(state)
    for section in range(2):
        assert as_rows(row_store.load_all(section)) == [
            (key, *row) for key in range(3) for row in model[key, section]
        ]
    assert row_store.registers[0].tolist() == [
        mark if model[key, 0] else HIGHEST for key in range(3)
    ]
    groups = key_groups(KEYS).tolist()
    assert all(
        state.groups[name] == groups[next(at for at in range(3) if name.endswith(KEYS[at].as_py()))]
        for name in state.values
    )


def fill(state: MemoryState, count: int) -> None:
    row_store = opened(state, KEYS.slice(0, 1))
    writer = RowStoreWriter(row_store)
    rows = as_records([(0, at, 0, b"x") for at in range(count)])
    writer.replace(0, rows, rows.keys, rows.sort_keys)
    writer.save()


def test_loading_a_range_of_a_large_key_reads_that_range() -> None:
    state = MemoryState()
    fill(state, 100)
    row_store = opened(state, KEYS.slice(0, 1))
    found = row_store.load(0, np.array([40]), np.array([42]))
    assert {40, 41, 42} <= set(found.sort_keys.tolist())
    assert len(found) <= 6


def test_changing_a_chunk_writes_that_chunk_alone() -> None:
    state = MemoryState()
    fill(state, 100)
    state.take_changes()
    row_store = opened(state, KEYS.slice(0, 1))
    found = row_store.load(0, np.array([40]), np.array([40]))
    writer = RowStoreWriter(row_store)
    writer.replace(
        0,
        StoredRows(found.keys, found.sort_keys, found.flags + np.uint8(1), found.rows),
        np.array([0]),
        np.array([40]),
    )
    writer.save()
    assert [name[:1] for name in state.take_changes()] == [b"l"]


def test_rows_before_the_first_chunk() -> None:
    """The first chunk has all that is below, also when it was not always the first."""
    state = MemoryState()
    fill(state, 12)
    for comes, goes in (([], range(5)), (range(-9, 3), [])):
        row_store = opened(state, KEYS.slice(0, 1))
        rows = sorted({*row_store.load_all(0).sort_keys.tolist(), *comes} - {*goes})
        writer = RowStoreWriter(row_store)
        touched = np.array([*comes, *goes], np.int64)
        writer.replace(
            0,
            as_records([(0, at, 0, b"x") for at in rows]),
            np.zeros(len(touched), np.int64),
            touched,
        )
        writer.save()
    assert opened(state, KEYS.slice(0, 1)).load_all(0).sort_keys.tolist() == [
        *range(-9, 3),
        *range(5, 12),
    ]
    found = opened(state, KEYS.slice(0, 1)).load(0, np.array([-3]), np.array([1]))
    assert {-3, -2, -1, 0, 1} <= set(found.sort_keys.tolist())


def test_a_key_that_was_not_loaded_cannot_be_changed() -> None:
    state = MemoryState()
    fill(state, 100)
    row_store = opened(state, KEYS.slice(0, 1))
    row_store.load(0, np.array([40]), np.array([40]))
    with pytest.raises(BugError, match="not loaded"):
        RowStoreWriter(row_store).replace(0, StoredRows.empty(), np.array([0]), np.array([90]))


def test_a_part_that_is_missing_is_named() -> None:
    state = MemoryState()
    fill(state, 100)
    del state.values[next(name for name in state.values if name[:1] == b"l")]
    with pytest.raises(CorruptionError, match="lacks 1 of its parts"):
        opened(state, KEYS.slice(0, 1)).load_all(0)


def test_state_of_a_newer_version_is_refused() -> None:
    state = MemoryState()
    fill(state, 1)
    (name,) = state.values
    state.values[name] = b"\x02" + state.values[name][1:]
    with pytest.raises(NewerFormat, match="newer Headrace"):
        opened(state, KEYS.slice(0, 1))


def test_the_stored_bytes() -> None:
    state = MemoryState()
    fill(state, 1)
    record = (0).to_bytes(8, "little") + b"\0" + (1).to_bytes(4, "little") + b"x"
    head = (
        b"\x01"
        + HIGHEST.to_bytes(8, "little")
        + bytes([1, 0, 0, 0, 0, 0, 0, 0])
        + bytes([14, 0, 0, 0, 0, 0, 0, 0])
    )
    assert state.values == {b"ha": head + record}
