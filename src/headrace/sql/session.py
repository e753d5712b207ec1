"""`SqlSession`: runs texts of SQL on a pipeline. All statements of a text are compiled before any
of them counts: if one has an error, all errors are raised, and the pipeline is as it was.

    session = SqlSession(pipeline)
    session.run("CREATE TOPIC orders (…); CREATE VIEW revenue AS SELECT …")

`script` cuts the text, `statements`, `services` and `descriptions` know the statements, `query` the
queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.errors import BadQuery, HeadraceError
from headrace.sql.catalog import DependsOnError, SqlCatalog, SqlPipeline
from headrace.sql.cursor import Cursor
from headrace.sql.descriptions import describe, explain, show
from headrace.sql.problems import FOREIGN, SqlRefusal, error_of
from headrace.sql.query import rows_of
from headrace.sql.query_parser import read_query
from headrace.sql.script import MAX_STATEMENT, QUOTED, WORD, Script, Span
from headrace.sql.services import create_alert, create_function, create_sink, create_source
from headrace.sql.statements import (
    create_stream,
    create_temporary_view,
    create_topic,
    create_view,
    drop,
    insert,
    remove,
)

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream, Table

_STARTS = ("CREATE", "DROP", "INSERT", "SELECT", "WITH", "SHOW", "DESCRIBE", "DESC", "EXPLAIN")
_CREATED = ("TOPIC", "TABLE", "VIEW", "STREAM", "SOURCE", "SINK", "ALERT", "FUNCTION")
_PREFIXES = ("MATERIALIZED", "TEMPORARY", "TEMP", "STREAMING")
_ELSEWHERE = {
    "UPDATE": "append the new row to the table's topic: INSERT INTO name VALUES (…).",
    "DELETE": "append a deletion to the table's topic, with producer.delete or a capture.",
    "MERGE": "append the new rows to the table's topic: a table has the newest row of each key.",
    "TRUNCATE": "let rows expire: WITH (retention = '30 days') of the topic.",
    "ALTER": "edit the CREATE statement; `headrace topic alter` changes a topic's columns.",
    "SET": "give it as an option of CREATE … WITH (…), or of the command that runs the file.",
    "USE": "leave it out: a pipeline's names are in one space.",
    "BEGIN": "leave it out: all outputs of a pipeline change together, by ticks.",
    "COMMIT": "leave it out: all outputs of a pipeline change together, by ticks.",
    "GRANT": "say who may read when the views are served.",
    "VALUES": "write them to a topic, with INSERT INTO topic VALUES (…).",
    "REFRESH": "leave it out: views follow their topics by themselves.",
}


@dataclass(frozen=True)
class StatementResult:
    """What one statement has come to.

    Attributes:
        statement: Its first words, such as CREATE VIEW.
        rows: The stream or table that it declares or selects.
        answer: The rows of SHOW, DESCRIBE and EXPLAIN.
    """

    statement: str
    rows: Stream | Table | None = None
    answer: pa.Table | None = None


class SqlSession:
    """Texts of SQL on one pipeline, which keeps their names.

    Args:
        pipeline: The pipeline.
        trusted: Whether statements may import code and name other systems, as the author of a
            pipeline may. Without it, CREATE SOURCE, SINK, ALERT and FUNCTION are refused.
    """

    def __init__(self, pipeline: SqlPipeline, *, trusted: bool = True) -> None:
        self.catalog = SqlCatalog(pipeline)
        self.trusted = trusted

    def run(
        self, text: str, *, name: str = "", rows: dict[str, Any] | None = None
    ) -> list[StatementResult]:
        """Compile all statements of a text, and declare what they say.

        Args:
            text: The statements.
            name: What errors call the text, such as the file's name.
            rows: Streams and tables by the names that this text has for them.

        Returns:
            What each statement has come to.

        Raises:
            BadSql: The text has several errors. One alone is raised as what it is.
        """
        if not isinstance(text, str):
            raise BadQuery(
                f"The SQL is a {type(text).__name__}, not a text.", fix="give a text of SQL."
            )
        if not text.strip():
            raise BadQuery("The SQL is empty.", fix="write statements, such as SELECT … FROM ….")
        try:
            script = Script(text, name)
        except SqlRefusal as refusal:
            raise _unreadable(text, name, refusal) from None
        before = self.catalog.state()
        self.catalog.named.update(rows or {})
        results, refusals = self._compiled(script)
        if not results and not refusals:
            raise BadQuery("The SQL is empty.", fix="write statements, such as SELECT … FROM ….")
        if refusals:
            self.catalog.restore(before)
            raise error_of(script, refusals)
        for given in rows or {}:
            self.catalog.named.pop(given, None)
        self._declare_inserts()
        return results

    def _compiled(self, script: Script) -> tuple[list[StatementResult], list[SqlRefusal]]:
        results: list[StatementResult] = []
        refusals: list[SqlRefusal] = []
        for span in script.statements():
            self.catalog.reads.clear()
            try:
                results.append(self._statement(span))
            except DependsOnError:
                self._mark_broken(span)
            except SqlRefusal as refusal:
                refusals.append(refusal)
                self._mark_broken(span)
            except HeadraceError as error:
                refusals.append(
                    SqlRefusal(span.start, error.message, error.fix, type(error), error)
                )
                self._mark_broken(span)
            except FOREIGN as error:
                reason = f"{type(error).__name__}: {error}"
                refusals.append(
                    SqlRefusal(
                        span.start,
                        f"This statement cannot be declared so: {reason}.",
                        "correct the values of its options.",
                    )
                )
                self._mark_broken(span)
            except RecursionError:
                refusals.append(
                    SqlRefusal(
                        span.start,
                        "This statement is nested too deeply.",
                        "split it, with WITH name AS (SELECT …) or CREATE TEMPORARY VIEW.",
                    )
                )
                self._mark_broken(span)
        return results, refusals

    def _mark_broken(self, span: Span) -> None:
        """Remember the name that a statement with an error would have declared."""
        tokens = span.tokens
        if tokens[0].upper != "CREATE":
            return
        for at, token in enumerate(tokens[1:], 1):
            if token.upper in _CREATED and at + 1 < len(tokens):
                cursor = Cursor(Span(span.script, span.first + at + 1, span.stop))
                cursor.take("IF", "NOT", "EXISTS")
                if cursor.token.kind in {WORD, QUOTED}:
                    self.catalog.broken.add(cursor.path().lower())
                return

    def _statement(self, span: Span) -> StatementResult:
        if span.end - span.start > MAX_STATEMENT:
            raise SqlRefusal(
                span.start,
                f"This statement has {span.end - span.start:,} characters, and may have"
                f" {MAX_STATEMENT:,}.",
                "split it, with CREATE TEMPORARY VIEW; rows belong into a file.",
            )
        span.check_brackets()
        cursor = Cursor(span)
        word = cursor.token.upper
        if word in {"SELECT", "WITH", "("}:
            query = read_query(cursor)
            cursor.finish(
                "the end of the statement",
                ("FROM", "WHERE", "GROUP", "HAVING", "ORDER", "LIMIT", "UNION", "JOIN", "EMIT"),
            )
            return StatementResult("SELECT", rows_of(query, self.catalog.find))
        if word in _ELSEWHERE:
            raise SqlRefusal(
                cursor.offset, f"There is no statement {word}.", _ELSEWHERE[word], BadQuery
            )
        start = cursor.expect_one(_STARTS)
        if start == "CREATE":
            return self._create(cursor)
        if start == "DROP":
            drop(cursor, self.catalog)
            return StatementResult("DROP")
        if start == "INSERT":
            insert(cursor, self.catalog)
            return StatementResult("INSERT")
        answers: dict[str, Callable[[Cursor, SqlCatalog], pa.Table]] = {
            "SHOW": show,
            "DESCRIBE": describe,
            "DESC": describe,
            "EXPLAIN": explain,
        }
        return StatementResult(start, answer=answers[start](cursor, self.catalog))

    def _create(self, cursor: Cursor) -> StatementResult:
        replaces = cursor.take("OR", "REPLACE")
        prefix = cursor.take_one(_PREFIXES)
        offset = cursor.offset
        kind = cursor.expect_one(_CREATED)
        if prefix is not None and kind not in {"VIEW", "TABLE"}:
            raise SqlRefusal(offset, f"There is no {prefix} {kind}.", f"leave out {prefix}.")
        if replaces:
            self._drop_for(kind, cursor)
        if kind in {"SOURCE", "SINK", "ALERT", "FUNCTION"} and not self.trusted:
            raise SqlRefusal(
                offset,
                f"CREATE {kind} names other systems or code, which only the pipeline's author may.",
                "declare it in the file that runs the pipeline.",
            )
        rows = self._declared(kind, prefix, cursor)
        return StatementResult(f"CREATE {kind}", rows)

    def _declared(self, kind: str, prefix: str | None, cursor: Cursor) -> Stream | Table | None:
        catalog = self.catalog
        if kind == "VIEW":
            is_temporary = prefix in {"TEMPORARY", "TEMP"}
            return (create_temporary_view if is_temporary else create_view)(cursor, catalog)
        if kind == "STREAM" or prefix == "STREAMING":
            return create_stream(cursor, catalog)
        if kind in {"TOPIC", "TABLE"}:
            return create_topic(cursor, catalog, is_table=kind == "TABLE")
        services = {
            "SOURCE": create_source,
            "SINK": create_sink,
            "ALERT": create_alert,
            "FUNCTION": create_function,
        }
        services[kind](cursor, catalog)
        return None

    def _drop_for(self, kind: str, cursor: Cursor) -> None:
        """Undo what CREATE OR REPLACE replaces, if it is there."""
        ahead = Cursor(Span(cursor.script, cursor.at, cursor.stop))
        offset = ahead.offset
        name = ahead.path("a name")
        remove(self.catalog, kind.lower(), name, offset, missing_is_fine=True)

    def _declare_inserts(self) -> None:
        """Declare a source for the rows of INSERT, per topic."""
        from headrace.sources.declaration import values

        pipeline = self.catalog.pipeline
        for topic, lists in self.catalog.inserts.items():
            name = f"insert.{topic}"
            pipeline.captures.pop(name, None)
            pipeline.source(values(topic, lists, name=name))


def _unreadable(text: str, name: str, refusal: SqlRefusal) -> HeadraceError:
    """The error for a text that has no tokens."""
    script = Script.__new__(Script)
    script.text, script.name, script.tokens = text, name, []
    return error_of(script, [refusal])
