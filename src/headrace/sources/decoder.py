"""Rows of a source in the columns of their topic, and dead letters of those that do not fit.

rows          {"id": 1}    {"id": "x"}    {"id": 3}
fitting       the first and the third, as one Arrow batch
misfits       1: "column 'id': it is a string, not a whole number"
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, UPDATE_POSTIMAGE
from headrace.errors import BadRows
from headrace.log.dead_letters import DeadLetter
from headrace.log.rows import check_changes, to_batch
from headrace.log.values import TopicInfo
from headrace.types.json_codec import decode_rows, decode_rows_exactly
from headrace.types.text import TextRow, TextRowParser

GivenRows = Any
"""Dicts, JSON objects as bytes, rows of a text file (`TextRow`), or Arrow data."""
Part = tuple[pa.RecordBatch | None, list[DeadLetter]]


class SourceDecoder:
    """Decodes rows of one topic."""

    def __init__(self, info: TopicInfo, place: str) -> None:
        self._info = info
        self._place = place
        schema = info.arrow_schema
        if info.is_table:  # a row without a change type is an upsert
            index = schema.get_field_index(CHANGE_TYPE)
            schema = schema.set(index, schema.field(index).with_nullable(True))
        self._schema = schema

    def decode(self, rows: GivenRows, *, where: str = "", are_json: bool = False) -> Part:
        """Return the rows that fit, None if there are none, and dead letters of the others.

        Args:
            rows: Dicts of Python values; JSON objects as bytes; rows of a text file; or Arrow data.
            where: What they are of, for dead letters, such as a file.
            are_json: Whether dicts are parsed JSON, in which times are texts.
        """
        if isinstance(rows, pa.Table | pa.RecordBatch):
            table = pa.table(rows) if isinstance(rows, pa.RecordBatch) else rows
            return self._decode_arrow(table, where)
        if not rows:
            return None, []
        if isinstance(rows[0], bytes):
            return self._decode_json(list(rows), where)
        if are_json:
            return self._decode_parsed(list(rows), where)
        return self._decode_listed(list(rows), where)

    def _decode_json(self, values: list[Any], where: str) -> Part:
        decoded = decode_rows(values, self._schema, history=self._info.schema_history)
        letters = [
            DeadLetter(self._place, _at(where, reason), payload=values[index])
            for index, reason in decoded.misfits.items()
        ]
        return self._checked(decoded.batch, letters, where)

    def _decode_parsed(self, values: list[Any], where: str) -> Part:
        history = self._info.schema_history
        decoded = decode_rows_exactly(
            values, self._schema, history=history, parser=lambda value: value
        )
        letters = [
            DeadLetter(self._place, _at(where, reason), row=_as_json(values[index]))
            for index, reason in decoded.misfits.items()
        ]
        return self._checked(decoded.batch, letters, where)

    def _decode_listed(self, rows: list[Any], where: str) -> Part:
        """Decode all rows together; where that fails, each half, until those that do not fit stand
        alone.
        """
        letters: list[DeadLetter] = []
        batches: list[pa.RecordBatch] = []
        waiting = [rows]
        while waiting:
            part = waiting.pop()
            try:
                batches.append(self._batch(part, where))
            except BadRows as error:
                if len(part) > 1:
                    half = len(part) // 2
                    waiting += [part[half:], part[:half]]
                else:
                    letters.append(
                        DeadLetter(self._place, _at(where, error.message), row=_as_json(part[0]))
                    )
        if not batches:
            return None, letters
        batch = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
        return self._checked(batch, letters, where)

    def _batch(self, rows: list[Any], where: str) -> pa.RecordBatch:
        if isinstance(rows[0], TextRow):
            return self._text_batch(rows, where)
        names = self._schema.names
        for row in rows:
            if extra := [name for name in row if name not in names]:
                raise BadRows(f"The topic has no column {extra[0]!r}.")
        filled = [{name: row.get(name) for name in names} for row in rows]
        return to_batch(filled, self._schema, topic=self._info.name)

    def _text_batch(self, rows: list[TextRow], where: str) -> pa.RecordBatch:
        info = self._info
        parser = TextRowParser(
            info.arrow_schema,
            (),
            is_table=info.is_table,
            topic=info.name,
            source=where,
            history=info.schema_history,
        )
        present = {info.schema_history.present_name(name) for name in rows[0].values}
        missing = {
            name: None
            for name in self._schema.names
            if name != CHANGE_TYPE and name not in present and name not in rows[0].values
        }
        filled = [TextRow(row.line, {**row.values, **missing}) for row in rows]
        return self._aligned(pa.Table.from_batches([parser.batch(filled, csv=True)]))

    def _decode_arrow(self, table: pa.Table, where: str) -> Part:
        if not table.num_rows:
            return None, []
        try:
            batch = to_batch(self._aligned(table), self._schema, topic=self._info.name)
        except BadRows as error:
            if table.num_rows == 1:
                row = _as_json(table.to_pylist()[0])
                return None, [DeadLetter(self._place, _at(where, error.message), row=row)]
            half = table.num_rows // 2
            parts = [self._decode_arrow(table.slice(0, half), where)]
            parts.append(self._decode_arrow(table.slice(half), where))
            batches = [batch for batch, _ in parts if batch is not None]
            letters = [letter for _, part in parts for letter in part]
            if not batches:
                return None, letters
            return pa.Table.from_batches(batches).combine_chunks().to_batches()[0], letters
        return self._checked(batch, [], where)

    def _aligned(self, table: pa.Table) -> pa.RecordBatch:
        """Return the topic's columns; those that the rows lack are null."""
        if extra := [name for name in table.column_names if name not in self._schema.names]:
            raise BadRows(f"The topic {self._info.name!r} has no column {extra[0]!r}.")
        columns = [
            _single(table.column(field.name))
            if field.name in table.column_names
            else pa.nulls(table.num_rows, field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, names=self._schema.names)

    def _checked(self, batch: pa.RecordBatch, letters: list[DeadLetter], where: str) -> Part:
        """Fill in change types, and turn rows with impossible changes into dead letters."""
        if not batch.num_rows:
            return None, letters
        if not self._info.is_table:
            return batch.cast(self._info.arrow_schema), letters
        index = batch.schema.get_field_index(CHANGE_TYPE)
        types = pc.fill_null(batch.column(index), UPDATE_POSTIMAGE)
        arrays = [types if i == index else column for i, column in enumerate(batch.columns)]
        batch = pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
        batch = batch.cast(self._info.arrow_schema.remove_metadata())
        is_fitting = [True] * batch.num_rows
        try:
            check_changes(batch, topic=self._info.name)
        except BadRows:
            for row in range(batch.num_rows):
                try:
                    check_changes(batch.slice(row, 1), topic=self._info.name)
                except BadRows as error:
                    is_fitting[row] = False
                    text = _as_json(batch.slice(row, 1).to_pylist()[0])
                    letters.append(DeadLetter(self._place, _at(where, error.message), row=text))
            batch = batch.filter(pa.array(is_fitting))
        if not batch.num_rows:
            return None, letters
        schema = self._info.arrow_schema
        return pa.RecordBatch.from_arrays(batch.columns, schema=schema), letters


def _single(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _at(where: str, reason: str) -> str:
    return reason if not where or where in reason else f"{where}: {reason}"


def _as_json(row: Any) -> str:
    values = row.values if isinstance(row, TextRow) else row
    return json.dumps(values, ensure_ascii=False, default=str)
