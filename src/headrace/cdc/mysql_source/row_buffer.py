"""How rows of the binlog become changes of a table: which of an event's values belong to which of
its columns, what kind of change a row is, and the rows that are not emitted yet.

    event          UPDATE, before (1, "new", 2026, 2038), after (1, "new", 2026, 2027)
    layout         columns 0 and 1, key 0; the row's time ends in column 3, as it is versioned
    buffered       delete (1, "new")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from headrace.cdc.base import TableChanges
from headrace.cdc.mysql_source.binlog import UPDATE_ROWS, WRITE_ROWS
from headrace.cdc.mysql_source.catalogue import MysqlTable, make_table
from headrace.cdc.mysql_source.chunk import change_batch
from headrace.cdc.mysql_source.column_type import logged_values
from headrace.cdc.mysql_source.row_event import LoggedTable, topic_column
from headrace.columnar.columns import (
    COMMITTED_AT,
    DELETE,
    INSERT,
    ORDER,
    POSITION,
    TRANSACTION,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)

_FOREVER = ("2038-01-19 03:14:07", "2106-02-07 06:28:15")
"""When a current row of a system-versioned table ends, without the fraction."""


@dataclass(frozen=True)
class RowLayout:
    """How the values of an event become those of the table."""

    logged: LoggedTable
    indices: tuple[int, ...] | None
    """Where the table's columns are in the event; None if they are all that it has."""
    key: tuple[int, ...]
    """Where the key's columns are in the event."""
    row_end: int | None
    """Where the end of a row's time is, in a system-versioned table."""

    def is_current(self, image: Sequence[Any]) -> bool:
        """Return whether a row of a system-versioned table is current: rows of its history are in
        the table too, with the time at which they ended.
        """
        if self.row_end is None:
            return True
        end = image[self.row_end]
        return end == 2**64 - 1 if isinstance(end, int) else str(end).startswith(_FOREVER)

    def pick(self, image: Sequence[Any]) -> Sequence[Any]:
        """Return the values of the table's columns."""
        return image if self.indices is None else [image[index] for index in self.indices]


def make_layout(
    name: str, logged: LoggedTable, hints: Sequence[MysqlTable]
) -> tuple[MysqlTable, RowLayout]:
    """Return a table as it was when an event was written.

    Args:
        name: The table's name.
        logged: How the binlog describes it.
        hints: The table as it is known otherwise: before the event, or now. They tell what the
            binlog does not: which binary strings are addresses, and which columns are the period
            of a system-versioned table.

    Raises:
        ConfigurationError: The table had no key.
    """
    own_names = [column.name for column in logged.columns]
    forms = {column: form for table in hints for column, form in table.address_forms.items()}
    row_end = next((table.row_end for table in hints if table.row_end in own_names), None)
    listed = {column for table in hints for column in table.names}
    hidden = {"row_start", "row_end"} - listed if row_end else set()
    columns = [
        topic_column(column, forms.get(column.name))
        for column in logged.columns
        if column.name not in hidden
    ]
    table = make_table(name, columns, logged.key, row_end)
    indices = tuple(own_names.index(column.name) for column in columns)
    layout = RowLayout(
        logged=logged,
        indices=None if len(indices) == len(own_names) else indices,
        key=tuple(own_names.index(column.name) for column in table.key_columns),
        row_end=own_names.index(row_end) if row_end else None,
    )
    return table, layout


@dataclass
class RowBuffer:
    """Rows of a table that are not emitted yet, with what the hidden columns say of each."""

    images: list[Sequence[Any]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seconds: list[int] = field(default_factory=list)
    transactions: list[int] = field(default_factory=list)

    def add(
        self, event_kind: int, images: Sequence[Sequence[Any]], layout: RowLayout, order: int
    ) -> int:
        """Add the rows of an event, whose first one has the number `order` in its transaction.
        Returns the number of the next one.
        """
        if event_kind in UPDATE_ROWS:
            for before, after in zip(images[::2], images[1::2], strict=True):
                self._add_update(before, after, layout, order)
                order += 1
            return order
        kind = INSERT if event_kind in WRITE_ROWS else DELETE
        for image in images:
            if layout.is_current(image):
                self._add(layout.pick(image), kind, order)
            order += 1
        return order

    def _add_update(
        self, before: Sequence[Any], after: Sequence[Any], layout: RowLayout, order: int
    ) -> None:
        """Add an update. If it changes the key, it is a delete and an insert; so it is if it ends a
        row of a system-versioned table, or brings it back.
        """
        was_current, is_current = layout.is_current(before), layout.is_current(after)
        has_key = all(before[index] == after[index] for index in layout.key)
        is_update = was_current and is_current and has_key
        if was_current:
            self._add(layout.pick(before), UPDATE_PREIMAGE if is_update else DELETE, order)
        if is_current:
            self._add(layout.pick(after), UPDATE_POSTIMAGE if is_update else INSERT, order)

    def _add(self, image: Sequence[Any], kind: str, order: int) -> None:
        self.images.append(image)
        self.kinds.append(kind)
        self.orders.append(order)

    def finish(self, position: int, at_s: int, transaction: int) -> int:
        """Give all rows that were added since the last call the values of their event. Returns how
        many they were.
        """
        count = len(self.kinds) - len(self.positions)
        self.positions += [position] * count
        self.seconds += [at_s] * count
        self.transactions += [transaction] * count
        return count

    def to_changes(self, table: MysqlTable) -> TableChanges:
        """Return the rows as changes of the table."""
        micros = [at_s * 1_000_000 for at_s in self.seconds]
        hidden = {
            POSITION: pa.array(self.positions, pa.int64()),
            COMMITTED_AT: pa.array(micros, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            TRANSACTION: pa.array(self.transactions, pa.int64()),
            ORDER: pa.array(self.orders, pa.int32()),
        }
        values = [
            logged_values(column_values, column)
            for column_values, column in zip(
                zip(*self.images, strict=True), table.columns, strict=True
            )
        ]
        return TableChanges(table.shape.name, change_batch(table, values, hidden, self.kinds))
