"""The state of a capture as a note of the log, of this version and of earlier ones, and snapshots
that begin anew.
"""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

import headrace as hr
from headrace.cdc.base import SnapshotChunk, StreamPart, TableShape, TableStorage
from headrace.cdc.state import (
    CaptureState,
    SnapshotState,
    TableState,
    read_requests,
    read_state,
    request_name,
    request_snapshot,
)
from headrace.errors import ConfigurationError, InputError, NewerFormat
from tests.cdc.captures import writer

VERSION_1 = {
    "version": 1,
    "position": "16/B374D848@7412345678901234567.2",
    "tables": {
        "public.orders": {
            "topic": "orders",
            "columns": [["id", "INT"]],
            "snapshot": {"after": ["7"], "rows": 7, "about": 9, "since": {"0": 4}},
        },
        "public.items": {"topic": "items", "columns": [["id", "INT"]], "snapshot": None},
    },
    "handled": '{"tables": ["public.orders"], "at": 5}',
}


def test_a_state_of_version_1_is_read() -> None:
    state = read_state(json.dumps(VERSION_1), capture="shop")
    assert state.position == VERSION_1["position"]
    assert state.pending == ["public.orders"]
    snapshot = state.tables["public.orders"].snapshot
    assert snapshot == SnapshotState(["7"], 7, 9, {"0": 4}, has_begun=True)
    assert read_state(state.to_json(), capture="shop") == state


def test_a_state_comes_back_as_it_was_stored() -> None:
    table = TableState(
        "orders",
        [["id", "INT"]],
        snapshot=SnapshotState(condition="id > 1"),
        storage=TableStorage(("1 2", "3"), ("3",), "4", "5"),
        conditions=["id < 9"],
        stopped="gone",
        is_gone=True,
    )
    state = CaptureState("7", {"orders": table}, handled=5, is_paused=True)
    stored = read_state(state.to_json(), capture="shop")
    assert stored.to_json() == state.to_json()
    assert stored.tables["orders"].storage == table.storage
    with pytest.raises(NewerFormat):
        read_state(json.dumps({**VERSION_1, "version": 99}), capture="shop")


def test_of_two_requests_for_snapshots_one_was_lost(address: str) -> None:
    with hr.open_log(address) as log:
        request_snapshot(log, "shop", ["orders"])
        request_snapshot(log, "shop", ["items"], condition="id > 1")
        request_snapshot(log, "shop", action="pause")
        first, *others = read_requests(log.note(request_name("shop")), after=0)
        assert first.tables == ("orders",)
        assert [(other.action, other.condition) for other in others] == [
            ("snapshot", "id > 1"),
            ("pause", None),
        ]
        assert read_requests(log.note(request_name("shop")), after=first.number) == others
        with pytest.raises(ConfigurationError):
            request_snapshot(log, "shop", [])
        with pytest.raises(InputError):
            request_snapshot(log, "shop", ["a", "b"], condition="id > 1")
        with pytest.raises(InputError, match="did you mean 'pause'"):
            request_snapshot(log, "shop", action="paus")


def test_a_snapshot_that_began_anew_went_on_behind_a_chunk_of_the_one_before(address: str) -> None:
    shape = TableShape("orders", (("id", "BIGINT"),), ("id",))
    columns = {"id": pa.array([5, 6]), "_change_type": pa.array(["insert"] * 2)}
    arrays = [columns.get(field.name, pa.nulls(2, field.type)) for field in shape.batch_schema]
    rows = pa.RecordBatch.from_arrays(arrays, schema=shape.batch_schema)
    with hr.open_log(address) as log:
        orders = writer(log, "shop")
        orders.reload()
        orders.add(shape)
        orders.await_chunk("orders")
        orders.restart_snapshot("orders")
        chunk = SnapshotChunk("orders", rows, ["6"], is_last=True)
        orders.write(StreamPart([chunk], "1"))
        snapshot = orders.state.tables["orders"].snapshot
        assert snapshot is not None
        assert snapshot.after is None
        orders.await_chunk("orders")
        orders.write(StreamPart([chunk], "2"))
        assert orders.state.pending == []
        orders.commit()
        orders.close()
        assert log.end_offsets("orders") == {0: 2}


def test_storage_says_when_rows_were_rewritten() -> None:
    before = TableStorage(("1", "2"), files="10", definition="a")
    assert not TableStorage(("2", "1"), files="11", definition="a").was_rewritten_since(before)
    assert not TableStorage(("1", "2"), files="10", definition="b").was_rewritten_since(before)
    assert TableStorage(("1", "2"), files="11", definition="b").was_rewritten_since(before)
    assert TableStorage(("1",), files="10", definition="a").was_rewritten_since(before)
    new = TableStorage(("1", "2", "3"), files="10", definition="a")
    assert new.was_rewritten_since(before)
    assert not replace(new, empty_parts=("3",)).was_rewritten_since(before)
