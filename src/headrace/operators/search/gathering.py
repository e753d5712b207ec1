"""One row a document: the matches that the shards found of it, put together, by query key. It remembers nothing: a document's matches are all of one tick."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.joins.sides import ticks_of
from headrace.operators.kernel import TICK, KeyedState
from headrace.operators.keys import encode_keys, whole
from headrace.operators.search.kernel import PLACE


class GatherKernel:
    """`documents`: the columns of a document. `matches`: those of a match, which become the list in `column`, in order of `order`."""

    def __init__(self, documents: pa.Schema, matches: pa.Schema, order: tuple[str, ...], column: str) -> None:
        self.documents, self.matches, self.order, self.column = documents, matches, order, column

    @cached_property
    def output(self) -> pa.Schema:
        return self.documents.append(pa.field(self.column, pa.list_(pa.struct(list(self.matches)))))

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:  # noqa: ARG002
        """Sorted by tick, document and query key; then each run of one document is a row."""
        ticks, place = ticks_of(rows), whole(rows.column(PLACE))
        sorted_by = pa.table({"tick": ticks, "place": place, "key": encode_keys(rows, self.order)})
        order = pc.sort_indices(sorted_by, sort_keys=[(name, "ascending") for name in sorted_by.column_names]).to_numpy()
        of = place.dictionary_encode().indices.to_numpy()[order]
        begins = np.flatnonzero(np.append(True, of[1:] != of[:-1])) if len(order) else order
        first = pa.array(order[begins])
        columns = [whole(rows.column(name)).take(first) for name in self.documents.names]
        struct = pa.StructArray.from_arrays([whole(rows.column(name)).take(pa.array(order)) for name in self.matches.names], fields=list(self.matches))
        offsets = pa.array(np.append(begins, len(order)).astype(np.int32))
        lists = pa.ListArray.from_arrays(offsets, struct, type=self.output.field(self.column).type)
        schema = self.output.append(pa.field(TICK, pa.int64(), nullable=False))
        return pa.Table.from_arrays([*columns, lists, pa.array(ticks[order[begins]])], schema=schema)
