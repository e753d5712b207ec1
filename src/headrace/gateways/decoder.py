"""Decodes the rows of submissions, and finds those that do not fit their topic.

    submissions    {"order_id": 1}    {"order_id": "x"}    {"order_id": 2}
    fitting        the first and the third, as one Arrow batch
    refused        the second: "Row 0: column 'order_id': it is a string, not a whole number"

A submission is decoded or refused as a whole. Rows of many are decoded together; only where that
fails is each looked at alone. Whatever a row contains, it ends here or in the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby
from typing import Any, cast

import pyarrow as pa

from headrace.columnar.columns import CHANGE_TYPE
from headrace.errors import BadRows, HeadraceError
from headrace.gateways.inbox import (
    ArrowRows,
    CsvRows,
    JsonLines,
    JsonRows,
    PlainRows,
    Submission,
)
from headrace.log.rows import to_batch
from headrace.types.json_codec import Decoded, decode_rows, decode_rows_exactly
from headrace.types.schema_history import NO_HISTORY, SchemaHistory
from headrace.types.text import TextRow, TextRowParser


def is_unfit(error: BaseException) -> bool:
    """Whether an error says that rows cannot be converted or encoded: what Arrow and Python raise
    for values, and what the log refuses as `BadRows`.
    """
    if isinstance(error, HeadraceError):
        return isinstance(error, BadRows)
    kinds = (pa.ArrowException, ValueError, TypeError, ArithmeticError, LookupError, RecursionError)
    return isinstance(error, kinds) and not isinstance(error, MemoryError)


def unfit_reason(error: BaseException) -> str:
    """Return why rows do not fit, for their sender."""
    if isinstance(error, HeadraceError):
        return error.message
    return f"The rows cannot be encoded: {str(error) or type(error).__name__}."


@dataclass
class DecodedSubmissions:
    """The rows of submissions that fit their topic, and why the others do not."""

    fitting: list[Submission] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """How many rows each fitting submission has."""
    batches: list[pa.RecordBatch] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """The reasons, by `id()` of the submission."""

    def add(self, submissions: Sequence[Submission], batch: pa.RecordBatch) -> None:
        self.fitting += submissions
        self.counts += [_count(submission) for submission in submissions]
        self.batches.append(batch)

    def refuse(self, reasons: dict[int, str]) -> None:
        """Remove submissions that turn out not to fit, given as reasons by `id()`. Their rows must
        be removed from the batches too.
        """
        is_fitting = [id(submission) not in reasons for submission in self.fitting]
        self.fitting = list(compress(self.fitting, is_fitting))
        self.counts = list(compress(self.counts, is_fitting))
        self.refused |= reasons


def _count(submission: Submission) -> int:
    content = submission.content
    return content.batch.num_rows if isinstance(content, ArrowRows) else len(content.values)


def decode_submissions(
    submissions: Sequence[Submission],
    schema: pa.Schema,
    *,
    ignored: Collection[str],
    topic: str,
    history: SchemaHistory = NO_HISTORY,
) -> DecodedSubmissions:
    """Decode submissions of one topic.

    Args:
        submissions: The submissions.
        schema: The columns that senders give.
        ignored: Columns that senders may give and that are not used.
        topic: The topic's name, for errors.
        history: What has become of the topic's columns: JSON may have their former names.
    """
    result = DecodedSubmissions()
    for kind, run in groupby(submissions, key=lambda submission: type(submission.content)):
        together = list(run)
        if kind in {JsonLines, JsonRows}:
            _decode_json(together, schema, ignored, history, result)
        else:
            for submission in together:
                content = cast("PlainRows | CsvRows | ArrowRows", submission.content)
                rows: pa.RecordBatch | list[dict[str, Any]]
                try:
                    if isinstance(content, ArrowRows):
                        rows = _aligned(content.batch, schema)
                    elif isinstance(content, CsvRows):
                        rows = _aligned(_from_csv(content, schema, ignored, topic, history), schema)
                    else:
                        rows = [
                            {name: row.get(name) for name in schema.names} for row in content.values
                        ]
                    result.add([submission], to_batch(rows, schema, topic=topic))
                except Exception as error:
                    if not is_unfit(error):
                        raise
                    result.refused[id(submission)] = unfit_reason(error)
    return result


def _decode_json(
    submissions: list[Submission],
    schema: pa.Schema,
    ignored: Collection[str],
    history: SchemaHistory,
    result: DecodedSubmissions,
) -> None:
    """Decode submissions together. If some do not fit, each of these is refused as a whole, and the
    others are decoded again.
    """
    try:
        parts = _decode(submissions, schema, ignored, history)
    except Exception as error:
        if not is_unfit(error):
            raise
        if len(submissions) == 1:
            result.refused[id(submissions[0])] = unfit_reason(error)
        else:
            for submission in submissions:
                _decode_json([submission], schema, ignored, history, result)
        return
    if not parts.misfits:
        result.add(submissions, parts.batch)
        return
    first = 0
    fitting = []
    for submission in submissions:
        stop = first + _count(submission)
        misfits = [index for index in parts.misfits if first <= index < stop]
        if misfits:
            reason = parts.misfits[misfits[0]]
            result.refused[id(submission)] = f"Row {misfits[0] - first}: {reason}"
        else:
            fitting.append(submission)
        first = stop
    if fitting:
        result.add(fitting, _decode(fitting, schema, ignored, history).batch)


def _decode(
    submissions: Sequence[Submission],
    schema: pa.Schema,
    ignored: Collection[str],
    history: SchemaHistory,
) -> Decoded:
    values: list[Any] = []
    for submission in submissions:
        values += cast("JsonLines | JsonRows", submission.content).values
    if isinstance(submissions[0].content, JsonLines):
        return decode_rows(values, schema, ignored=ignored, history=history)
    return decode_rows_exactly(
        values, schema, ignored=ignored, history=history, parser=lambda value: value
    )


def _from_csv(
    content: CsvRows,
    schema: pa.Schema,
    ignored: Collection[str],
    topic: str,
    history: SchemaHistory,
) -> pa.RecordBatch:
    """Convert CSV by the types of the columns, as `headrace produce` does. Columns that the heading
    lacks are null.
    """
    is_table = CHANGE_TYPE in schema.names
    parser = TextRowParser(
        schema, (), is_table=is_table, topic=topic, source="The body", history=history
    )
    names = [name for name in schema.names if name != CHANGE_TYPE]
    present = {name: history.present_name(name) for name in content.values[0].values}
    missing = dict.fromkeys(set(names) - set(present) - set(present.values()))
    rows = [
        TextRow(
            row.line,
            {name: value for name, value in row.values.items() if name not in ignored} | missing,
        )
        for row in content.values
    ]
    return parser.batch(rows, csv=True)


def _aligned(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema; those that the batch lacks are null."""
    arrays = [
        (
            batch.column(column.name)
            if column.name in batch.schema.names
            else pa.nulls(batch.num_rows, column.type)
        )
        for column in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)
