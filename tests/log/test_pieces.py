"""Tables in pieces: no row is lost however large the columns are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from headrace.columnar.buffers import PIECE_BYTES, pieces
from headrace.log.dead_letters import rows_to_texts


def unmade_text(rows: int, bytes_a_row: int) -> pa.Array:
    """Text of zeros that nobody looks at: its memory is only made when it is read."""
    offsets = (np.arange(rows + 1) * bytes_a_row).astype(np.int32)
    return pa.StringArray.from_buffers(
        rows, pa.py_buffer(offsets), pa.py_buffer(np.zeros(rows * bytes_a_row, np.uint8))
    )


def test_a_column_that_does_not_fit_into_one_batch_comes_in_several() -> None:
    text = unmade_text(1_100, 1_000_000)
    rows = pa.table({"text": pa.chunked_array([text, text]), "n": pa.array(range(2_200))})
    found = list(pieces(rows.slice(0, 2_200)))
    assert [number for piece in found for number in piece.column("n").to_pylist()] == list(
        range(2_200)
    )
    assert max(piece.nbytes for piece in found) <= PIECE_BYTES


@pytest.mark.parametrize("max_bytes", [1, 100, 10_000])
def test_rows_of_any_size_keep_their_order(max_bytes: int) -> None:
    batches = [
        pa.record_batch({"n": [first, first + 1, first + 2], "text": ["x" * first, "", None]})
        for first in range(0, 60, 3)
    ]
    found = list(pieces(pa.Table.from_batches(batches), max_bytes))
    assert pa.Table.from_batches(found).equals(pa.Table.from_batches(batches).combine_chunks())
    assert all(piece.nbytes <= max_bytes or piece.num_rows == 1 for piece in found)
    assert max_bytes < 10_000 or len(found) == 1, "as few as the bound allows"


def test_an_empty_table_has_no_pieces() -> None:
    assert list(pieces(pa.table({"n": pa.array([], pa.int64())}))) == []


def test_every_row_has_its_text_however_many_pieces_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.columnar.buffers.PIECE_BYTES", 100)
    rows = pa.table({"n": pa.array(range(500))})
    assert rows_to_texts(rows).to_pylist() == [f'{{"n":{number}}}' for number in range(500)]
    assert rows_to_texts(rows).num_chunks > 10
