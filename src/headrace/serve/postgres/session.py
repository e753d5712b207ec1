"""What a session of Postgres's protocol does with statements. `connection.py` carries its messages.

    SELECT, WITH, VALUES, TABLE    a query over views (DuckDB's dialect), or over the catalogue
    SUBSCRIBE TO view              the changes of a view, without end
    DECLARE, FETCH, MOVE, CLOSE    cursors over both
    COPY (…) TO STDOUT             the rows as lines
    SET, SHOW, RESET, DISCARD      settings
    BEGIN, COMMIT, ROLLBACK, …     kept as clients expect; nothing is ever written
    PREPARE, EXECUTE, DEALLOCATE   statements with a name

Everything else is refused: views are changed by their pipelines.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from headrace.errors import BadQuery, ChangesGone, UnknownView
from headrace.run_status import pipeline_name
from headrace.serve.channels import Hub
from headrace.serve.postgres import errors, values
from headrace.serve.postgres.catalogue import Catalogue
from headrace.serve.postgres.catalogue_query import CatalogueQuery, rewrite
from headrace.serve.postgres.errors import SqlError
from headrace.serve.postgres.lexer import (
    NUMBER,
    QUOTED,
    STRING,
    WORD,
    SqlStatement,
    SqlToken,
    split,
)
from headrace.serve.postgres.messages import FAILED, IDLE, IN_TRANSACTION, TEXT
from headrace.serve.postgres.parameters import parameter_types
from headrace.serve.postgres.query_text import (
    column_name,
    is_about_catalogue,
    mentions,
    with_parameters,
    without_schema,
)
from headrace.serve.postgres.roles import Role
from headrace.serve.postgres.settings import SessionSettings
from headrace.serve.postgres.subscription import (
    RowEncoding,
    SubscribeRequest,
    follow_view,
    subscription_schema,
)
from headrace.serve.read_your_writes import OffsetWaiter
from headrace.serve.requests import Limits, ReadPool
from headrace.serve.selections import parse_selection
from headrace.serve.stores import ViewLocation, ViewStores
from headrace.serve.time_travel import TickNotKept
from headrace.views.file import ViewInfo
from headrace.views.sql import Cancellation, SqlLimits, SqlScope, run_query

MAX_STATEMENTS = 1_000
MAX_CURSORS = 20
MAX_STATEMENT_CHARACTERS = 256 << 10
_DESCRIBED = 500
_QUERIES = {"select", "with", "values", "table", "from"}
_TRANSACTIONS = {
    "begin",
    "start",
    "commit",
    "end",
    "rollback",
    "abort",
    "savepoint",
    "release",
}
_IGNORED = {"listen": "LISTEN", "unlisten": "UNLISTEN", "checkpoint": "CHECKPOINT"}


class Backend(Protocol):
    """What a session needs of the server of views."""

    stores: ViewStores
    hub: Hub
    queries: ReadPool
    reads: ReadPool
    offset_waiter: OffsetWaiter
    limits: Limits


# Outcomes


@dataclass(frozen=True)
class Done:
    """A statement that gives no rows."""

    tag: str
    reported: tuple[str, ...] = ()
    """The settings that it changed and that are reported to clients."""
    warning: str = ""


@dataclass
class ResultRows:
    """The rows of a statement."""

    table: pa.Table
    word: str = "SELECT"

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema


@dataclass(frozen=True)
class Changes:
    """A subscription."""

    request: SubscribeRequest
    schema: pa.Schema


@dataclass(frozen=True)
class Copy:
    """Rows, or a subscription, as lines of COPY."""

    source: ResultRows | Changes


@dataclass
class Fetched:
    """Messages that a cursor over a subscription gave."""

    schema: pa.Schema
    messages: list[bytes]


Outcome = Done | ResultRows | Changes | Copy | Fetched


# What a session keeps


@dataclass(frozen=True)
class Prepared:
    """A statement with a name, and the types of its parameters."""

    statement: SqlStatement
    types: tuple[int, ...]
    schema: pa.Schema | None
    """The columns of its rows; None if it has none."""


@dataclass
class PostgresCursor:
    """A cursor over rows, or over a subscription."""

    source: ResultRows | Changes
    at: int = 0
    following: AsyncGenerator[bytes, None] | None = None
    pending: bytearray = field(default_factory=bytearray)
    next_part: asyncio.Future[bytes] | None = None
    """The part of a subscription that is being waited for, over several FETCHes."""


class PostgresSession:
    """One session: its role, settings, statements, cursors and the state of its transaction."""

    def __init__(self, backend: Backend, role: Role, database: str) -> None:
        self._backend = backend
        self.role = role
        self.database = database
        self.settings = SessionSettings(role.name)
        self.process = secrets.randbelow((1 << 31) - 2) + 1
        self.status = IDLE
        self.prepared: dict[str, Prepared] = {}
        self.cursors: dict[str, PostgresCursor] = {}
        self._held: set[str] = set()
        self._described: OrderedDict[Any, tuple[tuple[int, ...], pa.Schema | None]] = OrderedDict()
        self.cancellation: Cancellation | None = None

    async def close(self) -> None:
        for name in list(self.cursors):
            await self._close_cursor(name)

    # Views

    def views(self) -> list[ViewInfo]:
        """The views that the role sees."""
        return [
            info
            for info in self._backend.stores.store().reader.views()
            if self.role.may_read(info.name)
        ]

    def mentioned_views(self, statement: SqlStatement) -> list[ViewInfo]:
        """The views whose names are in a statement."""
        if statement.is_empty:
            return []
        return [info for info in self.views() if mentions(statement, info.name)]

    def _locate(self, name: str) -> ViewLocation:
        self._check_readable(name)
        return self._backend.stores.locate(name)

    def _check_readable(self, name: str) -> None:
        names = [info.name for info in self._backend.stores.store().reader.views()]
        if name in names and not self.role.may_read(name):
            raise SqlError(errors.INSUFFICIENT_PRIVILEGE, f"permission denied for view {name}")
        if name not in names:
            raise UnknownView(name, [each for each in names if self.role.may_read(each)])

    # Statements

    def check_runnable(self, statement: SqlStatement) -> None:
        """Refuse statements in a transaction that has failed, but for its end."""
        if self.status == FAILED and statement.words(1)[0] not in {
            "rollback",
            "abort",
            "commit",
            "end",
        }:
            raise SqlError(
                errors.IN_FAILED_TRANSACTION,
                "current transaction is aborted, commands ignored until end of transaction block",
                fix="ROLLBACK.",
            )

    def fail(self) -> None:
        """A statement failed: a transaction can only be ended now."""
        if self.status == IN_TRANSACTION:
            self.status = FAILED

    async def execute(
        self, statement: SqlStatement, types: Sequence[int] = (), parameters: Sequence[Any] = ()
    ) -> Outcome:
        """Run one statement.

        Raises:
            HeadraceError: It cannot run.
        """
        if len(statement.text) > MAX_STATEMENT_CHARACTERS:
            raise SqlError(
                errors.LIMIT_EXCEEDED,
                f"The statement has {len(statement.text):,} characters; at most"
                f" {MAX_STATEMENT_CHARACTERS:,}.",
            )
        self.check_runnable(statement)
        word = statement.words(1)[0]
        if word in _QUERIES or statement.tokens[0].text == "(":
            return ResultRows(await self.query(statement, types, parameters))
        if word in _TRANSACTIONS:
            return await self._transaction(statement, word)
        if word in _IGNORED:
            return Done(_IGNORED[word])
        act = _STATEMENTS.get(word)
        if act is None:
            raise self._refused(statement, word)
        outcome: Outcome = await act(self, statement, types, parameters)
        return outcome

    def _refused(self, statement: SqlStatement, word: str) -> SqlError:
        if word in {"insert", "update", "delete", "create", "drop", "alter", "truncate", "merge"}:
            return SqlError(
                errors.READ_ONLY,
                f"cannot execute {word.upper()}: views are read-only",
                fix="append rows to the pipeline's topics; the views follow.",
            )
        return SqlError(
            errors.SYNTAX_ERROR,
            f'syntax error at or near "{statement.tokens[0].text[:40]}"',
            fix="write SELECT, SUBSCRIBE, DECLARE, FETCH, COPY, SET, SHOW or EXPLAIN.",
            position=statement.tokens[0].start,
        )

    async def describe(
        self, statement: SqlStatement, given: Sequence[int]
    ) -> tuple[tuple[int, ...], pa.Schema | None]:
        """The types of a statement's parameters, and the columns of its rows, if it has rows."""
        if statement.is_empty:
            return tuple(given), None
        word = statement.words(1)[0]
        if word not in _QUERIES and statement.tokens[0].text != "(":
            return tuple(given), self._command_schema(statement, word)
        mentioned = self.mentioned_views(statement)
        shape = tuple((info.name, info.generation) for info in mentioned)
        cache_key = (statement.text, tuple(given), shape)
        if (known := self._described.get(cache_key)) is not None:
            self._described.move_to_end(cache_key)
            return known
        types = tuple(parameter_types(statement, given, [info.schema for info in mentioned]))
        empty = await self.query(statement, types, [None] * len(types), only_schema=True)
        self._described[cache_key] = types, empty.schema
        if len(self._described) > _DESCRIBED:
            self._described.popitem(last=False)
        return types, empty.schema

    def _command_schema(self, statement: SqlStatement, word: str) -> pa.Schema | None:
        if word == "show":
            return pa.schema([pa.field(self._shown_name(statement), pa.string())])
        if word == "explain":
            return pa.schema([pa.field("QUERY PLAN", pa.string())])
        if word == "subscribe":
            return self._subscribe_request(statement).schema
        if word == "fetch":
            cursor = self.cursors.get(self._cursor_name(statement))
            return None if cursor is None else cursor.source.schema
        if word == "execute" and len(statement.tokens) > 1:
            prepared = self.prepared.get(statement.tokens[1].name)
            return None if prepared is None else prepared.schema
        return None

    # Queries

    async def query(
        self,
        statement: SqlStatement,
        types: Sequence[int],
        parameters: Sequence[Any],
        *,
        only_schema: bool = False,
    ) -> pa.Table:
        """The rows of a query; with `only_schema` its columns alone."""
        self.check_runnable(statement)
        backend, limits = self._backend, self._backend.limits
        store = backend.stores.store()
        if (token := self.settings.after_token) and not only_schema:
            await backend.offset_waiter.wait(store, None, token, limits.wait_s)
        tick = self.settings.at_tick
        infos = self.views()
        text, used = with_parameters(statement, types, parameters)
        text, scope = self._scope(text, statement, infos)
        ticks = None if tick is None else {info.name: tick for info in infos}
        self.cancellation = cancellation = Cancellation()
        timeout_s = self.settings.timeout_s(limits.sql_s, limits.max_sql_s)
        try:
            result = await backend.queries.run(
                run_query,
                store.path,
                text,
                used,
                limits=SqlLimits(
                    timeout_s=timeout_s,
                    max_rows=limits.max_rows,
                    max_bytes=limits.sql_result_bytes,
                    memory_bytes=limits.sql_memory_bytes,
                ),
                ticks=ticks,
                scope=scope,
                cancellation=cancellation,
                only_schema=only_schema,
            )
        except UnknownView:
            self._check_other_views(statement)
            raise
        except ChangesGone as error:
            raise TickNotKept(error.view, error.asked, error.kept_after, error.tick) from None
        except BadQuery:
            if cancellation.is_cancelled:
                raise SqlError(
                    errors.QUERY_CANCELED, "canceling statement due to user request"
                ) from None
            raise
        finally:
            self.cancellation = None
        return result.rows.rename_columns(
            [column_name(name, statement) for name in result.rows.schema.names]
        )

    def _check_other_views(self, statement: SqlStatement) -> None:
        """Tell a view that the role may not read from one that does not exist."""
        for info in self._backend.stores.store().reader.views():
            if not self.role.may_read(info.name) and mentions(statement, info.name):
                raise SqlError(
                    errors.INSUFFICIENT_PRIVILEGE, f"permission denied for view {info.name}"
                )

    def _scope(
        self, text: str, statement: SqlStatement, infos: Sequence[ViewInfo]
    ) -> tuple[str, SqlScope]:
        """A query as DuckDB runs it, and what it may read."""
        names = frozenset(info.name for info in infos)
        if not is_about_catalogue(statement):
            return without_schema(text, self.database), SqlScope(views=names)
        query = rewrite(text, self.database)
        return query.text, self._catalogue_scope(query, infos, names)

    def _catalogue_scope(
        self, query: CatalogueQuery, infos: Sequence[ViewInfo], names: frozenset[str]
    ) -> SqlScope:
        catalogue = Catalogue(
            database=self.database,
            user=self.role.name,
            views=infos,
            settings=self.settings.as_dict(),
            process=self.process,
        )
        tables = {f"_pg.{name}" for name in query.tables}
        tables |= {f"_is.{name}" for name in query.information}
        return SqlScope(
            views=names,
            script=catalogue.script(query),
            tables=frozenset(tables),
            functions=frozenset(query.functions) | _CATALOGUE_FUNCTIONS,
        )

    # Transactions: nothing is written, so that they only have to look right

    async def _transaction(self, statement: SqlStatement, word: str) -> Done:
        words = statement.words(3)
        if word in {"begin", "start"}:
            warning = "" if self.status == IDLE else "there is already a transaction in progress"
            self.status = IN_TRANSACTION if self.status == IDLE else self.status
            return Done("BEGIN" if word == "begin" else "START TRANSACTION", warning=warning)
        if word == "savepoint":
            if self.status == IDLE:
                raise SqlError(
                    errors.NO_TRANSACTION, "SAVEPOINT can only be used in transaction blocks"
                )
            return Done("SAVEPOINT")
        if word == "release":
            return Done("RELEASE")
        if word in {"rollback", "abort"} and "to" in words:
            self.status = IN_TRANSACTION
            return Done("ROLLBACK")
        failed = self.status == FAILED
        warning = "there is no transaction in progress" if self.status == IDLE else ""
        self.status = IDLE
        for name in [name for name in self.cursors if name not in self._held]:
            await self._close_cursor(name)
        self.settings.end_transaction()
        is_commit = word in {"commit", "end"} and not failed
        return Done("COMMIT" if is_commit else "ROLLBACK", warning=warning)

    # Settings

    async def run_set(self, statement: SqlStatement, *_: Any) -> Done:
        tokens = list(statement.tokens[1:])
        is_local = bool(tokens) and tokens[0].lowered == "local"
        if tokens and tokens[0].lowered in {"session", "local"} and len(tokens) > 1:
            if tokens[1].lowered in {"characteristics", "authorization"}:
                return Done("SET")
            tokens = tokens[1:]
        if not tokens or tokens[0].lowered in {"transaction", "constraints"}:
            return Done("SET")
        if tokens[0].lowered == "role":
            return Done("SET")
        if [token.lowered for token in tokens[:2]] == ["time", "zone"]:
            name, rest = "TimeZone", tokens[2:]
        elif tokens[0].lowered == "names":
            name, rest = "client_encoding", tokens[1:]
        else:
            parts = 1
            while parts + 1 < len(tokens) and tokens[parts].text == ".":
                parts += 2
            name = ".".join(token.name for token in tokens[:parts:2])
            rest = tokens[parts:]
            if not rest or not (rest[0].text == "=" or rest[0].lowered == "to"):
                raise SqlError(
                    errors.SYNTAX_ERROR, f"SET {name[:80]}: no value", fix="SET name = value"
                )
            rest = rest[1:]
        value = "".join(", " if token.text == "," else _setting_text(token) for token in rest)
        is_default = len(rest) == 1 and rest[0].lowered == "default"
        if is_local and self.status == IDLE:
            self.settings.check(name)
            return Done("SET", warning="SET LOCAL can only be used in transaction blocks")
        reported = self.settings.set(name, None if is_default else value, is_local=is_local)
        return Done("SET", reported=() if reported is None else (reported,))

    async def run_reset(self, statement: SqlStatement, *_: Any) -> Done:
        if statement.words(2)[1:] == ("all",):
            return Done("RESET", reported=tuple(self.settings.reset()))
        reported = self.settings.set(self._shown_name(statement), None)
        return Done("RESET", reported=() if reported is None else (reported,))

    def _shown_name(self, statement: SqlStatement) -> str:
        words = [token.name for token in statement.tokens[1:] if token.text != "."]
        if words[:2] == ["time", "zone"]:
            return "TimeZone"
        if words[:2] == ["transaction", "isolation"]:
            return "transaction_isolation"
        return ".".join(words)

    async def run_show(self, statement: SqlStatement, *_: Any) -> ResultRows:
        name = self._shown_name(statement)
        if name == "all":
            items = sorted(self.settings.as_dict().items())
            columns = [[key for key, _ in items], [value for _, value in items]]
            names = ["name", "setting"]
            return ResultRows(
                pa.table([pa.array(column, pa.string()) for column in columns], names=names), "SHOW"
            )
        value = self.settings[name]
        return ResultRows(pa.table([pa.array([value], pa.string())], names=[name]), "SHOW")

    async def run_discard(self, statement: SqlStatement, *_: Any) -> Done:
        reported: list[str] = []
        if statement.words(2)[1:] == ("all",):
            reported = self.settings.reset()
            self.prepared.clear()
            for name in list(self.cursors):
                await self._close_cursor(name)
        return Done(
            "DISCARD ALL" if reported or statement.words(2)[1:] == ("all",) else "DISCARD",
            tuple(reported),
        )

    # Prepared statements

    def keep_prepared(self, name: str, prepared: Prepared) -> None:
        if name and name in self.prepared:
            raise SqlError(
                errors.DUPLICATE_STATEMENT, f'prepared statement "{name[:80]}" already exists'
            )
        if len(self.prepared) >= MAX_STATEMENTS:
            raise SqlError(
                errors.LIMIT_EXCEEDED,
                f"there are {MAX_STATEMENTS:,} prepared statements",
                fix="DEALLOCATE some.",
            )
        self.prepared[name] = prepared

    def prepared_statement(self, name: str) -> Prepared:
        prepared = self.prepared.get(name)
        if prepared is None:
            raise SqlError(
                errors.INVALID_STATEMENT, f'prepared statement "{name[:80]}" does not exist'
            )
        return prepared

    async def run_prepare(self, statement: SqlStatement, *_: Any) -> Done:
        at = next((n for n, token in enumerate(statement.tokens) if token.lowered == "as"), 0)
        if at < 2 or at + 1 >= len(statement.tokens):
            raise SqlError(errors.SYNTAX_ERROR, "PREPARE name [(types)] AS statement")
        inner = statement.from_token(at + 1)
        types, schema = await self.describe(inner, ())
        self.keep_prepared(statement.tokens[1].name, Prepared(inner, types, schema))
        return Done("PREPARE")

    async def run_execute(self, statement: SqlStatement, *_: Any) -> Outcome:
        if len(statement.tokens) < 2:
            raise SqlError(errors.SYNTAX_ERROR, "EXECUTE name [(values)]")
        prepared = self.prepared_statement(statement.tokens[1].name)
        given = [
            None if token.lowered == "null" else token.value
            for token in statement.tokens[3:-1]
            if token.text != ","
        ]
        if len(given) != len(prepared.types):
            raise SqlError(
                errors.SYNTAX_ERROR,
                f"wrong number of parameters: {len(given)}, expected {len(prepared.types)}",
            )
        parameters = [
            None if text is None else decode(oid, text.encode())
            for oid, text in zip(prepared.types, given, strict=True)
        ]
        return await self.execute(prepared.statement, prepared.types, parameters)

    async def run_deallocate(self, statement: SqlStatement, *_: Any) -> Done:
        name = statement.tokens[-1].name
        if statement.tokens[-1].lowered == "all":
            self.prepared.clear()
            return Done("DEALLOCATE ALL")
        self.prepared_statement(name)
        del self.prepared[name]
        return Done("DEALLOCATE")

    # Cursors

    async def run_declare(
        self, statement: SqlStatement, types: Sequence[int], parameters: Sequence[Any]
    ) -> Done:
        at = next((n for n, token in enumerate(statement.tokens) if token.lowered == "for"), 0)
        words = [token.lowered for token in statement.tokens[:at]]
        if at < 3 or "cursor" not in words or at + 1 >= len(statement.tokens):
            raise SqlError(errors.SYNTAX_ERROR, "DECLARE name CURSOR FOR query")
        if "binary" in words:
            raise SqlError(errors.FEATURE_NOT_SUPPORTED, "cursors are not binary")
        holds = "hold" in words and "without" not in words
        if self.status == IDLE and not holds:
            raise SqlError(
                errors.NO_TRANSACTION,
                "DECLARE CURSOR can only be used in transaction blocks",
                fix="BEGIN first, or write WITH HOLD.",
            )
        name = statement.tokens[1].name
        if name in self.cursors:
            raise SqlError(errors.DUPLICATE_CURSOR, f'cursor "{name[:80]}" already exists')
        if len(self.cursors) >= MAX_CURSORS:
            raise SqlError(
                errors.LIMIT_EXCEEDED, f"there are {MAX_CURSORS} cursors", fix="CLOSE some."
            )
        source = await self.execute(statement.from_token(at + 1), types, parameters)
        if not isinstance(source, ResultRows | Changes):
            raise SqlError(errors.SYNTAX_ERROR, "a cursor is for a query or a subscription")
        self.cursors[name] = PostgresCursor(source)
        if holds:
            self._held.add(name)
        return Done("DECLARE CURSOR")

    def _cursor_name(self, statement: SqlStatement) -> str:
        named = [token for token in statement.tokens if token.kind in {WORD, QUOTED}]
        at = next((n for n, token in enumerate(named) if token.lowered == "with"), len(named))
        return named[at - 1].name

    async def run_fetch(self, statement: SqlStatement, *_: Any) -> Outcome:
        cursor = self._cursor(self._cursor_name(statement))
        wanted = _fetch_count(statement)
        if isinstance(cursor.source, Changes):
            return await self._fetch_changes(cursor, wanted, _fetch_timeout_s(statement))
        count = cursor.source.table.num_rows - cursor.at
        taken = count if wanted is None else min(wanted, count)
        rows = cursor.source.table.slice(cursor.at, taken)
        cursor.at += taken
        if statement.words(1)[0] == "move":
            return Done(f"MOVE {taken}")
        return ResultRows(rows, "FETCH")

    async def _fetch_changes(
        self, cursor: PostgresCursor, wanted: int | None, timeout_s: float
    ) -> Fetched:
        """Rows of a subscription: those that are there, or that come in time."""
        assert isinstance(cursor.source, Changes)
        if cursor.following is None:
            formats = (TEXT,) * len(cursor.source.schema)
            cursor.following = self.follow(cursor.source, formats)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        messages: list[bytes] = []
        while wanted is None or len(messages) < wanted:
            if len(cursor.pending) >= 5:
                length = int.from_bytes(cursor.pending[1:5], "big") + 1
                if len(cursor.pending) >= length:
                    messages.append(bytes(cursor.pending[:length]))
                    del cursor.pending[:length]
                    continue
            if cursor.next_part is None:
                cursor.next_part = asyncio.ensure_future(anext(cursor.following))
            wait_s = 0.0 if messages else max(0.0, deadline_s - loop.time())
            done, _ = await asyncio.wait({cursor.next_part}, timeout=wait_s)
            if not done:
                break
            part, cursor.next_part = cursor.next_part.result(), None
            cursor.pending += part
        return Fetched(cursor.source.schema, messages)

    def _cursor(self, name: str) -> PostgresCursor:
        cursor = self.cursors.get(name)
        if cursor is None:
            raise SqlError(errors.INVALID_CURSOR, f'cursor "{name[:80]}" does not exist')
        return cursor

    async def run_close(self, statement: SqlStatement, *_: Any) -> Done:
        if statement.tokens[-1].lowered == "all":
            for name in list(self.cursors):
                await self._close_cursor(name)
            return Done("CLOSE CURSOR ALL")
        name = statement.tokens[-1].name
        self._cursor(name)
        await self._close_cursor(name)
        return Done("CLOSE CURSOR")

    async def _close_cursor(self, name: str) -> None:
        cursor = self.cursors.pop(name)
        self._held.discard(name)
        if cursor.next_part is not None:
            cursor.next_part.cancel()
            await asyncio.wait({cursor.next_part})
        if cursor.following is not None:
            await cursor.following.aclose()

    # Subscriptions and COPY

    async def run_subscribe(self, statement: SqlStatement, *_: Any) -> Changes:
        return self._subscribe_request(statement)

    def _subscribe_request(self, statement: SqlStatement) -> Changes:
        match = _SUBSCRIBE.fullmatch(statement.text)
        if match is None:
            raise SqlError(
                errors.SYNTAX_ERROR,
                "This is no SUBSCRIBE.",
                fix="SUBSCRIBE TO view [WHERE column = value AND …] [AS OF TICK n]",
            )
        name = match["quoted"].replace('""', '"') if match["quoted"] else match["plain"].lower()
        location = self._locate(name)
        with location.store.reader.snapshot() as snap:
            info = snap.view(location.stored_name)
        where = match["where"].strip() if match["where"] else None
        select = parse_selection(name, info.schema, info.key, [], where)
        after = int(match["tick"]) if match["tick"] else None
        return Changes(SubscribeRequest(name, select, after), subscription_schema(info.schema))

    def follow(
        self, changes: Changes, formats: Sequence[int] | None
    ) -> AsyncGenerator[bytes, None]:
        """The messages of a subscription; lines of COPY without formats."""
        encoding = RowEncoding(None if formats is None else tuple(formats), self.settings.zone)
        return follow_view(changes.request, encoding, self._backend.stores, self._backend.hub)

    async def run_copy(
        self, statement: SqlStatement, types: Sequence[int], parameters: Sequence[Any]
    ) -> Copy:
        match = _COPY.fullmatch(statement.text)
        if match is None:
            raise SqlError(
                errors.FEATURE_NOT_SUPPORTED,
                "Only COPY (query) TO STDOUT and COPY view TO STDOUT are supported, in text.",
            )
        inner = match["query"] or f"SELECT {match['columns'] or '*'} FROM {match['table']}"  # noqa: S608 - checked as any query
        (parsed,) = split(inner) or [SqlStatement("", (), 0)]
        if parsed.is_empty:
            raise SqlError(errors.SYNTAX_ERROR, "COPY has no query")
        source = await self.execute(parsed, types, parameters)
        if not isinstance(source, ResultRows | Changes):
            raise SqlError(errors.SYNTAX_ERROR, "COPY takes a query or a subscription")
        return Copy(source)

    async def run_explain(self, statement: SqlStatement, *_: Any) -> ResultRows:
        at = 1
        while statement.words(at + 1)[-1:] in {("analyze",), ("verbose",)}:
            at += 1
        if at < len(statement.tokens) and statement.tokens[at].text == "(":
            while at < len(statement.tokens) and statement.tokens[at].text != ")":
                at += 1
            at += 1
        inner = statement.from_token(at)
        if inner.is_empty:
            raise SqlError(errors.SYNTAX_ERROR, "EXPLAIN has no query")
        columns = (await self.describe(inner, ()))[1]
        lines = [f"Query over views, by DuckDB: {', '.join(columns.names) if columns else ''}"]
        lines += [
            f"  ->  view {info.name} at tick {info.tick}" for info in self.mentioned_views(inner)
        ]
        return ResultRows(pa.table([pa.array(lines, pa.string())], names=["QUERY PLAN"]), "EXPLAIN")


_STATEMENTS: Mapping[str, Any] = {
    "set": PostgresSession.run_set,
    "reset": PostgresSession.run_reset,
    "show": PostgresSession.run_show,
    "discard": PostgresSession.run_discard,
    "prepare": PostgresSession.run_prepare,
    "execute": PostgresSession.run_execute,
    "deallocate": PostgresSession.run_deallocate,
    "declare": PostgresSession.run_declare,
    "fetch": PostgresSession.run_fetch,
    "move": PostgresSession.run_fetch,
    "close": PostgresSession.run_close,
    "subscribe": PostgresSession.run_subscribe,
    "copy": PostgresSession.run_copy,
    "explain": PostgresSession.run_explain,
}
_CATALOGUE_FUNCTIONS = frozenset({"unnest", "struct_pack", "list_transform", "regexp_matches"})
_SUBSCRIBE = re.compile(
    r"""\s*SUBSCRIBE \s+ (?:TO \s+)? (?:"?public"?\s*\.\s*)?
    (?: "(?P<quoted>(?:[^"]|"")+)" | (?P<plain>[\w.\-]+) )
    (?: \s+ WHERE \s+ (?P<where>.+?) )?
    (?: \s+ AS \s+ OF \s+ TICK \s+ (?P<tick>\d{1,18}) )? \s*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_COPY = re.compile(
    r"""\s*COPY \s* (?: \( (?P<query>.+) \) |
    (?P<table>[\w."]+) \s* (?:\( (?P<columns>[^()]+) \))? ) \s* TO \s+ STDOUT
    (?: \s+ (?:WITH \s+)? \(? \s* (?:FORMAT \s+ )? TEXT \s* \)? )? \s*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)

_TIMEOUT = re.compile(r"WITH\s*\(\s*timeout\s*=?\s*'(\d+(?:\.\d+)?)\s*(ms|s)?'\s*\)", re.IGNORECASE)


def _setting_text(token: SqlToken) -> str:
    return token.value if token.kind in {STRING, NUMBER} else token.text.strip('"')


def decode(oid: int, data: bytes | None, form: int = 0) -> Any:
    """The value of a parameter. SqlError if its bytes are none of its type."""
    try:
        return values.decode_parameter(oid, form, data)
    except values.BadParameter as error:
        raise SqlError(errors.INVALID_TEXT, f"invalid value of a parameter: {error}") from None


def _fetch_count(statement: SqlStatement) -> int | None:
    """How many rows FETCH or MOVE takes; None for all."""
    words = [token for token in statement.tokens[1:] if token.text != ","]
    lowered = [token.lowered for token in words]
    if any(
        word in {"backward", "prior", "last", "absolute", "relative", "first"}
        for word in lowered[:1]
    ):
        raise SqlError(
            errors.FEATURE_NOT_SUPPORTED, "cursors move forward only", fix="FETCH n FROM cursor"
        )
    if words and words[0].text == "-":
        raise SqlError(errors.FEATURE_NOT_SUPPORTED, "cursors move forward only")
    for token in words[:2]:
        if token.kind == NUMBER:
            if not token.text.isdecimal() or len(token.text) > 18:
                raise SqlError(errors.SYNTAX_ERROR, f"{token.text[:40]} is no number of rows")
            return int(token.text)
        if token.lowered == "all":
            return None
    return 1


def _fetch_timeout_s(statement: SqlStatement) -> float:
    """FETCH … WITH (timeout = '2s'): how long it waits for a first row; a second if it is not
    said.
    """
    match = _TIMEOUT.search(statement.text)
    if match is None:
        return 1.0
    return min(60.0, float(match[1]) * (0.001 if match[2] == "ms" else 1.0))


def database_name(stores: ViewStores) -> str:
    """The name of the database that clients see: the pipeline's."""
    return pipeline_name(stores.state) or stores.state.name.partition(".")[0] or "headrace"
