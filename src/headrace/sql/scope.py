"""The names that expressions of a query can read, and expressions as the steps below take them.

A `QueryRows` is the rows that a query has made so far, with their visible columns: each has the
name by which the query reads it, the table that the name can be qualified with, and the column of
the rows. Columns that are not visible are part of a table's key, which a subquery has left out.

`QueryRows.compiled` makes of a span the text of an expression over the rows' columns: names lose
their qualifiers and get the spelling of the column, and everything else stays as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sqlglot import exp

from headrace.errors import BadExpression, PlanError, UnknownColumn, nearest
from headrace.expressions.literals import quoted_name
from headrace.expressions.parser import MAX_CHARACTERS, parse_sql
from headrace.sql.problems import SqlRefusal
from headrace.sql.script import QUOTED, WORD, Span

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream, Table
    from headrace.plan.plan import TimeColumn
    from headrace.sql.syntax import WindowCall

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_POSITION = re.compile(r"at line (\d+), position (\d+)")
Replaced = dict[int, tuple[int, str]]
"""Calls that became columns: by the index of their first token, the index behind their last one,
and the column.
"""
MAX_OPERATORS = 1_000
"""How many operators one expression may have. Trees of expressions are walked by recursion."""


@dataclass(frozen=True)
class VisibleColumn:
    """A column that a query can name.

    Attributes:
        name: How the query calls it.
        actual: The column of the rows.
        table: What the name can be qualified with; empty if nothing.
    """

    name: str
    actual: str
    table: str = ""


@dataclass(frozen=True)
class Compiled:
    """An expression over the columns of rows: its text, the columns it reads, and the column that
    it is, if it is nothing else.
    """

    text: str
    reads: frozenset[str]
    column: str | None
    name: str | None
    """How the query calls that column."""


@dataclass(frozen=True)
class QueryRows:
    """Rows, and what of them can be named. `window` says that they are to be put into windows."""

    rows: Stream | Table
    columns: tuple[VisibleColumn, ...]
    window: WindowCall | None = None
    copies: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Columns of a side of an outer join that may be missing, by table and name in lower case."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What to say of names that could be read before rows were grouped, by lower-case name."""

    unread: str = ""
    """The number of a row, in lower case, that was only compared: EXCEPT may name it."""

    @staticmethod
    def of(rows: Stream | Table, table: str) -> QueryRows:
        """All columns of rows, under a table's name."""
        return QueryRows(
            rows, tuple(VisibleColumn(name, name, table) for name in rows.schema.names)
        )

    def under(self, table: str) -> QueryRows:
        """The frame with its columns under another table's name."""
        return replace(self, columns=tuple(replace(each, table=table) for each in self.columns))

    def with_rows(self, rows: Stream | Table) -> QueryRows:
        return replace(self, rows=rows)

    @property
    def is_file(self) -> bool:
        """Whether the rows are a constant table in a file, which streams are joined with."""
        return not hasattr(self.rows, "step")

    @property
    def is_table(self) -> bool:
        return self.is_file or self.rows.step.is_table

    @property
    def time(self) -> str | None:
        """The column with the rows' event time."""
        time = self._time_column
        return None if time is None else time.name

    @property
    def time_shift_us(self) -> int:
        """How much later than its column the event time is: of a window, -1 microsecond."""
        time = self._time_column
        return 0 if time is None else time.shift_us

    @property
    def _time_column(self) -> TimeColumn | None:
        from headrace.plan.plan import time_column

        return None if self.is_file else time_column(self.rows.step)

    @property
    def tables(self) -> set[str]:
        return {each.table.lower() for each in self.columns if each.table}

    # Names

    def find(self, name: str, table: str | None = None) -> list[VisibleColumn]:
        """The columns that a name could be: exact ones, or those with the name in any case."""
        if table is not None and (copy := self.copies.get((table.lower(), name.lower()))):
            return [VisibleColumn(name, copy, table)]
        candidates = [
            each
            for each in self.columns
            if each.name.lower() == name.lower()
            and (table is None or each.table.lower() == table.lower())
        ]
        exact = [each for each in candidates if each.name == name]
        return exact or candidates

    def resolve(self, name: str, table: str | None, offset: int) -> VisibleColumn:
        """The one column that a name is. Raises SqlRefusal if there is none, or several."""
        found = self.find(name, table)
        if len({each.actual for each in found}) == 1:
            return found[0]
        full = f"{table}.{name}" if table else name
        if found:
            tables = [f"{each.table}.{each.name}" for each in found if each.table]
            raise SqlRefusal(
                offset,
                f"{full!r} could be several columns: {', '.join(tables or [full])}.",
                f"say which: {tables[0] if tables else 'rename one with AS'}.",
                PlanError,
            )
        if (reason := self.refused.get(name.lower())) is not None:
            raise SqlRefusal(
                offset, reason, "group by it, or aggregate it, as in max(…).", PlanError
            )
        if table is not None and table.lower() not in self.tables:
            raise SqlRefusal(
                offset,
                f"There is no table {table!r} in this query: {nearest(table, self.tables)}",
                kind=UnknownColumn,
            )
        known = [
            each.name
            for each in self.columns
            if table is None or each.table.lower() == table.lower()
        ]
        raise SqlRefusal(
            offset, f"There is no column {full!r}: {nearest(name, known)}", kind=UnknownColumn
        )

    # Expressions

    def compiled(
        self, span: Span, replaced: Mapping[int, tuple[int, str]] | None = None, *, what: str = ""
    ) -> Compiled:
        """An expression as the steps take it.

        Args:
            span: The expression.
            replaced: Calls in it that became columns: by the index of their first token, the index
                behind their last one, and the column of the rows.
            what: How errors call the expression.
        """
        if not span:
            raise SqlRefusal(span.start, f"{what or 'An expression'} was expected here.")
        check_size(span)
        text, offsets, actual = _text(span, replaced or {})
        tree = _parsed(text, offsets, span)
        reads: set[str] = set()
        edits: list[tuple[int, int, str]] = []
        whole: VisibleColumn | None = None
        for column in tree.find_all(exp.Column):
            parts = column.parts
            first = parts[0]
            start, end = first.meta.get("start"), first.meta.get("end")
            if start is None or end is None:
                continue
            if start in actual:  # a call that became a column
                reads.add(actual[start])
                if column is tree:
                    whole = VisibleColumn("", actual[start])
                continue
            found, used = self._column(parts, offsets.get(start, span.start))
            if column is tree and used == len(parts):
                whole = found
            reads.add(found.actual)
            stop = int(parts[used - 1].meta.get("end", end)) + 1
            own = parts[used - 1]
            if used == 1 and own.name == found.actual:
                continue
            written = text[int(own.meta["start"]) : int(own.meta["end"]) + 1]
            edits.append(
                (start, stop, written if own.name == found.actual else plain_name(found.actual))
            )
        for start, stop, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[stop:]
        if whole is not None:
            return Compiled(whole.actual, frozenset(reads), whole.actual, whole.name or None)
        return Compiled(text, frozenset(reads), None, None)

    def _column(self, parts: Sequence[exp.Expr], offset: int) -> tuple[VisibleColumn, int]:
        """The column that a name with dots begins with, and how many of its parts that takes: the
        others are members of a struct.
        """
        names = [part.name for part in parts]
        if len(names) > 1 and self.find(names[1], names[0]):
            return self.resolve(names[1], names[0], offset), 2
        if len(names) > 1 and not self.find(names[0]):
            return self.resolve(names[1], names[0], offset), 2
        return self.resolve(names[0], None, offset), 1

    def column_of(self, span: Span, what: str = "a column") -> str:
        """The column that an expression is. Raises SqlRefusal if it is anything else."""
        compiled = self.compiled(span, what=what)
        if compiled.column is None:
            raise SqlRefusal(
                span.start,
                f"{what.capitalize()} was expected here, and came {span.text()[:60]!r}.",
                "compute it in a query in FROM: FROM (SELECT *, … AS name FROM …).",
                PlanError,
            )
        return compiled.column


def check_size(span: Span) -> None:
    """Raise SqlRefusal if an expression is too long to be read."""
    length = span.end - span.start
    operators = len(span)
    if length > MAX_CHARACTERS or operators > 4 * MAX_OPERATORS:
        raise SqlRefusal(
            span.start,
            f"This expression has {length:,} characters and {operators:,} words, and may have"
            f" {MAX_CHARACTERS:,} and {4 * MAX_OPERATORS:,}.",
            "split it over queries in FROM, or join a table with the values that it compares.",
            BadExpression,
        )


def plain_name(name: str) -> str:
    """A column's name as an expression has it: as it is, or in backticks."""
    return name if _PLAIN.fullmatch(name) and name.upper() not in _RESERVED else quoted_name(name)


_RESERVED = frozenset(
    [
        "ALL",
        "AND",
        "ANY",
        "AS",
        "ASC",
        "BETWEEN",
        "BY",
        "CASE",
        "CAST",
        "CROSS",
        "CURRENT_DATE",
        "CURRENT_TIMESTAMP",
        "DESC",
        "DISTINCT",
        "ELSE",
        "END",
        "EXCEPT",
        "EXISTS",
        "FALSE",
        "FOR",
        "FROM",
        "FULL",
        "GROUP",
        "HAVING",
        "IN",
        "INNER",
        "INTERSECT",
        "INTERVAL",
        "INTO",
        "IS",
        "JOIN",
        "LEFT",
        "LIKE",
        "LIMIT",
        "NOT",
        "NULL",
        "ON",
        "OR",
        "ORDER",
        "OUTER",
        "OVER",
        "RIGHT",
        "RLIKE",
        "SELECT",
        "SOME",
        "TABLE",
        "THEN",
        "TRUE",
        "UNION",
        "USING",
        "VALUES",
        "WHEN",
        "WHERE",
        "WITH",
    ]
)


def _text(
    span: Span, replaced: Mapping[int, tuple[int, str]]
) -> tuple[str, dict[int, int], dict[int, str]]:
    """The text of an expression, with calls replaced by their columns; where the tokens of the text
    stand in the script; and the columns of the replaced calls by their offset in the text.
    """
    pieces: list[str] = []
    offsets: dict[int, int] = {}
    actual: dict[int, str] = {}
    length, skip_to = 0, span.first
    gap = ""
    for piece, index in span.pieces():
        if index is None:
            gap = piece
            continue
        if index < skip_to:
            gap = ""
            continue
        text = piece
        if gap and pieces:
            pieces.append(gap)
            length += len(gap)
        gap = ""
        if index in replaced:
            skip_to, column = replaced[index]
            text = plain_name(column)
            actual[length] = column
        offsets[length] = span.script.tokens[index].start
        pieces.append(text)
        length += len(text)
    return "".join(pieces), offsets, actual


def _parsed(text: str, offsets: Mapping[int, int], span: Span) -> exp.Expr:
    try:
        return parse_sql(text, where="", max_characters=None)
    except BadExpression as error:
        offset = span.start
        if match := _POSITION.search(error.message):
            line, position = int(match[1]), int(match[2])
            starts = [0, *(each.end() for each in re.finditer("\n", text))]
            wanted = starts[min(line, len(starts)) - 1] + position - 1
            known = [at for at in offsets if at <= wanted]
            offset = offsets[max(known)] if known else span.start
        reason = "is nested too deeply" if "deeply" in error.message else "cannot be read"
        raise SqlRefusal(
            offset,
            f"The expression {_shortened(span.text())!r} {reason}.",
            error.fix,
            BadExpression,
        ) from None


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 80 else f"{flat[:79]}…"


def normal_text(span: Span) -> str:
    """An expression's text by which two are compared: without comments, spaces, qualifiers, and
    small and capital letters.
    """
    tokens = span.unwrapped().tokens
    words = []
    for at, token in enumerate(tokens):
        following = tokens[at + 1].text if at + 1 < len(tokens) else ""
        before = tokens[at - 1].text if at else ""
        if token.kind in {WORD, QUOTED} and following == "." and before != ".":
            continue
        if token.text == "." and at and tokens[at - 1].kind in {WORD, QUOTED}:
            continue
        words.append(token.name.lower() if token.kind in {WORD, QUOTED} else token.text)
    return " ".join(words)


def unused_name(wanted: str, taken: Iterable[str]) -> str:
    """A column's name that no other has, in whatever case."""
    names = {each.lower() for each in taken}
    while wanted.lower() in names:
        wanted += "_"
    return wanted
