"""One connection of Postgres's protocol: its start, its messages in order, and its end.

    startup    SSLRequest, StartupMessage, SCRAM             or CancelRequest alone
    simple     Query                                         the rows of all its statements, ready
    extended   Parse, Bind, Describe, Execute, Close, Sync   after an error all is skipped to Sync

Messages are handled one after the other. What takes time (a query, a subscription) is a task;
meanwhile what the client sends waits, in a buffer that is bounded. Rows are written a few thousand
at a time, and no faster than the client reads: one that reads nothing for `slow_s` is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.errors import HeadraceError, InputError
from headrace.serve.channels import ServerClosing
from headrace.serve.postgres import errors, messages
from headrace.serve.postgres.errors import SqlError, error_message
from headrace.serve.postgres.key_lookup import KeyLookups, KeyQuery, parse_key_query
from headrace.serve.postgres.lexer import SqlStatement, split
from headrace.serve.postgres.messages import (
    CANCEL_REQUEST,
    GSS_REQUEST,
    IDLE,
    PROTOCOL_3,
    SSL_REQUEST,
    MessageBuffer,
    MessageReader,
    ProtocolError,
)
from headrace.serve.postgres.parameters import parameter_types
from headrace.serve.postgres.roles import (
    MECHANISM,
    AuthenticationFailed,
    Role,
    Roles,
    ScramExchange,
)
from headrace.serve.postgres.session import (
    Backend,
    Changes,
    Copy,
    Done,
    Fetched,
    Outcome,
    PostgresSession,
    Prepared,
    ResultRows,
    decode,
)
from headrace.serve.postgres.settings import REPORTED
from headrace.serve.postgres.values import (
    column_formats,
    copy_messages,
    describe,
    encode_rows,
    joined_bytes,
)

logger = logging.getLogger(__name__)
_ROWS_AT_ONCE = 4_096
_BUFFERED_BYTES = messages.MAX_MESSAGE_BYTES + (1 << 20)
_WRITE_BYTES = 1 << 20
START_S = 30.0
"""How long a client may take to log in."""
_WRONG_PASSWORD_S = 0.3
_MAX_PORTALS = 100


@dataclass
class Portal:
    """A statement with its parameters, and how far its rows were sent."""

    prepared: Prepared
    parameters: list[Any]
    formats: Sequence[int]
    key_query: KeyQuery | None
    outcome: Outcome | None = None
    at: int = 0


@dataclass(frozen=True)
class ConnectionContext:
    """What all connections of a listener share."""

    backend: Backend
    lookups: KeyLookups
    roles: Roles
    database: Callable[[], str]
    tls: ssl.SSLContext | None
    requires_tls: bool
    slow_s: float
    admit: Callable[[PostgresConnection], bool]
    forget: Callable[[PostgresConnection], None]
    cancel: Callable[[int, int], None]


class PostgresConnection(asyncio.Protocol):
    """One connection. See the module."""

    def __init__(self, context: ConnectionContext) -> None:
        self._context = context
        self._buffer = MessageBuffer()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._handle: Callable[[], bool] = self._startup
        self._task: asyncio.Task[None] | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._deadline: asyncio.TimerHandle | None = None
        self._unsent: list[bytes] = []
        self._is_closed = False
        self._is_cancelled = False
        self._is_reading = True
        self._is_secure = False
        self._skips_to_sync = False
        self._is_simple = False
        self._role: Role | None = None
        self._scram: ScramExchange | None = None
        self._startup_parameters: dict[str, str] = {}
        self._portals: dict[str, Portal] = {}
        self._key_queries: dict[SqlStatement, KeyQuery | None] = {}
        self.session: PostgresSession | None = None
        self.secret = secrets.randbits(31)

    # asyncio's protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        is_new = self._transport is None
        self._transport = transport
        transport.set_write_buffer_limits(_WRITE_BYTES)
        if is_new:
            self._deadline = self._loop.call_later(START_S, self._took_too_long)

    def data_received(self, data: bytes) -> None:
        self._buffer.feed(data)
        if self._task is not None and len(self._buffer) > _BUFFERED_BYTES:
            self._pause()
        self._advance()

    def eof_received(self) -> bool:
        self._end()
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        self._is_closed = True
        self._can_write.set()
        if self._deadline is not None:
            self._deadline.cancel()
        self._context.forget(self)
        if self.session is not None and self.session.cancellation is not None:
            self.session.cancellation.cancel()
        if self._task is not None:
            self._task.cancel()
        if self.session is not None:
            self._loop.create_task(self._close_session(self.session, self._task))

    async def _close_session(
        self, session: PostgresSession, task: asyncio.Task[None] | None
    ) -> None:
        if task is not None:
            await asyncio.wait({task})
        await session.close()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    # Messages in order

    def _advance(self) -> None:
        """Handle the messages that have come, until one takes time."""
        try:
            while self._task is None and not self._is_closed and self._handle():
                pass
        except ProtocolError as error:
            self._fatal(errors.PROTOCOL_VIOLATION, f"protocol violation: {error}")
        except HeadraceError as error:
            self._fatal(errors.sql_state(error), error.message)
        except Exception:
            logger.exception("A message of a client of Postgres's protocol could not be handled.")
            self._fatal(errors.INTERNAL, "an internal error; the server's log has it")
        if self._task is None and not self._is_reading and not self._is_closed:
            self._is_reading = True
            assert self._transport is not None
            self._transport.resume_reading()

    def _pause(self) -> None:
        if self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def _run(self, work: Awaitable[None]) -> None:
        """Handle the messages after this one when `work` has ended."""
        self._task = self._loop.create_task(self._work(work))

    async def _work(self, work: Awaitable[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            if self._is_closed:
                return
            self._failed(SqlError(errors.QUERY_CANCELED, "canceling statement due to user request"))
        except ServerClosing:
            self._fatal(errors.SHUTDOWN, "the server is shutting down")
        except HeadraceError as error:
            self._failed(error)
        except Exception:
            logger.exception("A statement of a client of Postgres's protocol could not be run.")
            self._failed(SqlError(errors.INTERNAL, "an internal error; the server's log has it"))
        finally:
            self._task = None
            self._is_cancelled = False
        if not self._is_closed:
            self._advance()

    def cancel(self) -> None:
        """End the running statement, if there is one."""
        if self._task is None or self.session is None or self._is_cancelled:
            return
        self._is_cancelled = True
        if self.session.cancellation is not None:
            self.session.cancellation.cancel()
        else:
            self._task.cancel()

    # Writing

    def _send(self, *parts: bytes) -> None:
        """Send messages. What is sent in one turn of the event loop is written at once."""
        if self._is_closed:
            return
        if not self._unsent:
            self._loop.call_soon(self._write)
        self._unsent += parts

    def _write(self) -> None:
        parts, self._unsent = self._unsent, []
        if parts and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    async def _drain(self) -> None:
        """Wait until the client has read enough. One that does not read is ended."""
        self._write()
        if self._can_write.is_set():
            if self._is_closed:
                raise asyncio.CancelledError
            return
        try:
            async with asyncio.timeout(self._context.slow_s):
                await self._can_write.wait()
        except TimeoutError:
            self._abort()
            raise asyncio.CancelledError from None

    def _fatal(self, state: str, text: str, hint: str | None = None) -> None:
        self._send(messages.error_response("FATAL", state, text, hint=hint))
        self._end()

    def _end(self) -> None:
        self._write()
        self._is_closed = True
        if self._transport is not None:
            if self._transport.get_write_buffer_size() > _WRITE_BYTES:
                self._transport.abort()  # it does not read
            else:
                self._transport.close()

    def _abort(self) -> None:
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def _took_too_long(self) -> None:
        self._fatal(errors.PROTOCOL_VIOLATION, "logging in took too long")

    def shut_down(self) -> None:
        self._fatal(errors.SHUTDOWN, "terminating connection: the server is shutting down")

    # Logging in

    def _startup(self) -> bool:
        content = self._buffer.startup()
        if content is None:
            return False
        reader = MessageReader(content)
        code = reader.int32()
        if code in {SSL_REQUEST, GSS_REQUEST}:
            self._secure(is_tls=code == SSL_REQUEST)
        elif code == CANCEL_REQUEST:
            self._context.cancel(reader.int32() & 0xFFFF_FFFF, reader.int32())
            self._end()
        elif code >> 16 == 3:
            self._begin(reader, code)
        else:
            raise ProtocolError(f"unsupported version {code >> 16}.{code & 0xFFFF}: use 3.0")
        return True

    def _secure(self, *, is_tls: bool) -> None:
        if not is_tls or self._context.tls is None or self._is_secure:
            self._send(b"N")
            return
        if len(self._buffer):  # sent in the clear before encryption: from somebody in between
            raise ProtocolError("data came before TLS was agreed on")
        self._send(b"S")
        self._write()  # in the clear, before what follows
        self._pause()
        self._run(self._start_tls(self._context.tls))

    async def _start_tls(self, context: ssl.SSLContext) -> None:
        assert self._transport is not None
        try:
            transport = await self._loop.start_tls(
                self._transport, self, context, server_side=True, ssl_handshake_timeout=START_S
            )
        except (OSError, ssl.SSLError):
            self._abort()
            return
        assert transport is not None
        self._transport, self._is_secure, self._is_reading = transport, True, True

    def _begin(self, reader: MessageReader, code: int) -> None:
        parameters: dict[str, str] = {}
        while name := reader.text():
            parameters[name] = reader.text()
        reader.end()
        if self._context.requires_tls and not self._is_secure:
            self._fatal(
                errors.INVALID_AUTHORIZATION,
                "this server requires TLS",
                "connect with sslmode=require",
            )
            return
        if not self._context.admit(self):
            self._fatal(errors.TOO_MANY_CONNECTIONS, "sorry, too many clients already")
            return
        user = parameters.get("user", "")
        if not user:
            self._fatal(errors.INVALID_AUTHORIZATION, "no user name was given")
            return
        unknown = [name for name in parameters if name.startswith("_pq_.")]
        if code != PROTOCOL_3 or unknown:
            self._send(messages.negotiate_version(unknown))
        self._startup_parameters = parameters
        self._role = self._context.roles.role(user)
        if not self._context.roles.need_password:
            self._welcome(self._role)
            return
        self._send(messages.authentication(10, MECHANISM.encode() + b"\0\0"))
        self._handle = self._authenticate

    def _authenticate(self) -> bool:
        received = self._buffer.message()
        if received is None:
            return False
        kind, content = received
        if kind != b"p":
            raise ProtocolError("a password message was expected")
        assert self._role is not None
        try:
            if self._scram is None:
                self._answer_first(MessageReader(content), self._role)
            else:
                answer = self._scram.final(content.decode())
                self._send(messages.authentication(12, answer.encode()))
                self._welcome(self._role)
        except (AuthenticationFailed, UnicodeDecodeError):
            self._run(self._refuse_password())
        return True

    def _answer_first(self, reader: MessageReader, role: Role) -> None:
        if reader.text() != MECHANISM or role.verifier is None:
            raise AuthenticationFailed
        scram = ScramExchange(role.verifier)
        answer = scram.first(reader.take(reader.int32()).decode())
        self._scram = scram
        self._send(messages.authentication(11, answer.encode()))

    async def _refuse_password(self) -> None:
        await asyncio.sleep(_WRONG_PASSWORD_S)
        user = self._startup_parameters["user"]
        self._fatal(
            errors.INVALID_PASSWORD, f'password authentication failed for user "{user[:80]}"'
        )

    def _welcome(self, role: Role) -> None:
        database = self._context.database()
        asked = self._startup_parameters.get("database") or database
        if asked not in {database, role.name}:
            self._fatal(
                errors.INVALID_CATALOG,
                f'database "{asked[:80]}" does not exist',
                f"connect to {database}",
            )
            return
        session = self.session = PostgresSession(self._context.backend, role, database)
        for name, value in self._startup_parameters.items():
            if name not in {"user", "database", "options", "replication"} and "." not in name[:5]:
                with contextlib.suppress(SqlError):
                    session.settings.set(name, value)
        for name, value in _options(self._startup_parameters.get("options", "")):
            try:
                session.settings.set(name, value)
            except SqlError as error:
                self._fatal(error.state, error.message)
                return
        settings = session.settings
        self._send(
            messages.AUTHENTICATION_OK,
            *(messages.parameter_status(name, settings[name]) for name in REPORTED),
            messages.backend_key(session.process, self.secret),
            messages.READY[IDLE],
        )
        if self._deadline is not None:
            self._deadline.cancel()
        self._handle = self._message

    # Messages of a session

    def _message(self) -> bool:
        received = self._buffer.message()
        if received is None:
            return False
        kind, content = received
        if kind == b"X":
            self._end()
        elif kind == b"S":
            self._sync()
        elif self._skips_to_sync:
            pass
        elif kind == b"Q":
            self._simple(content)
        elif kind in _EXTENDED:
            try:
                _EXTENDED[kind](self, MessageReader(content))
            except HeadraceError as error:
                self._failed(error)
        elif kind in {b"d", b"c", b"f"}:
            pass  # of a COPY that was refused
        else:
            raise ProtocolError(f"a message of kind {kind!r} is not known")
        return True

    def _failed(self, error: HeadraceError) -> None:
        """A statement failed: send its error, and what belongs to it is skipped."""
        assert self.session is not None
        self.session.fail()
        self._send(error_message(error, offset=getattr(error, "offset", 0)))
        if self._is_simple:
            self._ready()
        else:
            self._skips_to_sync = True

    def _ready(self) -> None:
        assert self.session is not None
        self._is_simple = False
        self._send(messages.READY[self.session.status])

    # Simple queries

    def _simple(self, content: bytes) -> None:
        assert self.session is not None
        self._is_simple = True
        reader = MessageReader(content)
        text = reader.text()
        reader.end()
        self._portals.pop("", None)
        try:
            statements = split(text)
        except InputError as error:
            self._failed(SqlError(errors.SYNTAX_ERROR, error.message))
            return
        if not statements:
            self._send(messages.EMPTY_QUERY)
            self._ready()
            return
        if len(statements) == 1 and self._answer_key_query(statements[0]):
            self._ready()
            return
        self._run(self._run_simple(statements))

    def _answer_key_query(self, statement: SqlStatement) -> bool:
        assert self.session is not None
        query = parse_key_query(statement)
        if query is None or not self._may_look_up(query):
            return False
        settings = self.session.settings
        try:
            found = self._context.lookups.find(
                query, (), lambda count: [messages.TEXT] * count, settings.zone
            )
        except HeadraceError:
            return False
        if found is None:
            return False
        self._send(
            messages.row_description(describe(found.schema)),
            found.message or b"",
            messages.command_complete(f"SELECT {int(found.message is not None)}"),
        )
        return True

    def _may_look_up(self, query: KeyQuery) -> bool:
        session = self.session
        assert session is not None
        settings = session.settings
        return (
            session.status != messages.FAILED
            and session.role.may_read(query.view)
            and not settings.after_token
            and settings.at_tick is None
        )

    async def _run_simple(self, statements: Sequence[SqlStatement]) -> None:
        assert self.session is not None
        for statement in statements:
            try:
                outcome = await self.session.execute(statement)
                await self._send_outcome(outcome)
            except HeadraceError as error:
                error.offset = statement.start  # type: ignore[attr-defined]
                raise
        self._ready()

    async def _send_outcome(self, outcome: Outcome) -> None:
        """Everything that a simple query answers for one statement."""
        if isinstance(outcome, Done):
            self._send_done(outcome)
        elif isinstance(outcome, ResultRows):
            self._send(messages.row_description(describe(outcome.schema)))
            await self._send_rows(outcome.table, ())
            self._send(messages.command_complete(_tag(outcome)))
        elif isinstance(outcome, Fetched):
            self._send(messages.row_description(describe(outcome.schema)), *outcome.messages)
            self._send(messages.command_complete(f"FETCH {len(outcome.messages)}"))
        elif isinstance(outcome, Changes):
            self._send(messages.row_description(describe(outcome.schema)))
            await self._send_changes(outcome, [messages.TEXT] * len(outcome.schema))
        else:
            await self._send_copy(outcome)

    def _send_done(self, outcome: Done) -> None:
        assert self.session is not None
        parts = [
            messages.parameter_status(name, self.session.settings[name])
            for name in outcome.reported
        ]
        if outcome.warning:
            warning = messages.error_response("WARNING", "01000", outcome.warning, kind=b"N")
            parts.append(warning)
        self._send(*parts, messages.command_complete(outcome.tag))

    async def _send_rows(self, table: pa.Table, formats: Sequence[int]) -> None:
        assert self.session is not None
        zone = self.session.settings.zone
        chosen = column_formats(formats, table.num_columns)
        for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
            self._send(encode_rows(batch, chosen, zone))
            await self._drain()
            await asyncio.sleep(0)  # others have their turn

    async def _send_changes(self, changes: Changes, formats: Sequence[int] | None) -> None:
        """Send a subscription until it is cancelled, or fails."""
        assert self.session is not None
        async with contextlib.aclosing(self.session.follow(changes, formats)) as parts:
            async for part in parts:
                self._send(part)
                await self._drain()

    async def _send_copy(self, outcome: Copy) -> None:
        assert self.session is not None
        self._send(messages.copy_out(len(outcome.source.schema)))
        if isinstance(outcome.source, Changes):
            await self._send_changes(outcome.source, None)
            return
        table = outcome.source.table
        for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
            self._send(joined_bytes(copy_messages(batch, self.session.settings.zone)))
            await self._drain()
            await asyncio.sleep(0)
        self._send(messages.COPY_DONE, messages.command_complete(f"COPY {table.num_rows}"))

    # The extended protocol

    def _parse(self, reader: MessageReader) -> None:
        assert self.session is not None
        name, text = reader.text(), reader.text()
        given = [reader.int32() & 0xFFFF_FFFF for _ in range(reader.count())]
        reader.end()
        try:
            statements = split(text)
        except InputError as error:
            raise SqlError(errors.SYNTAX_ERROR, error.message) from None
        if len(statements) > 1:
            raise SqlError(
                errors.SYNTAX_ERROR, "cannot insert multiple commands into a prepared statement"
            )
        statement = statements[0] if statements else SqlStatement("", (), 0)
        if not statement.is_empty:
            self.session.check_runnable(statement)
        if not name:
            self.session.prepared.pop("", None)
        schemas = [info.schema for info in self.session.mentioned_views(statement)]
        types = tuple(parameter_types(statement, given, schemas))
        self.session.keep_prepared(name, Prepared(statement, types, None))
        self._send(messages.PARSE_COMPLETE)

    def _bind(self, reader: MessageReader) -> None:
        assert self.session is not None
        portal, name = reader.text(), reader.text()
        prepared = self.session.prepared_statement(name)
        forms = [reader.int16() for _ in range(reader.count())]
        count = reader.count()
        raw: list[bytes | None] = []
        for _ in range(count):
            length = reader.int32()
            raw.append(None if length == -1 else reader.take(length))
        formats = [reader.int16() for _ in range(reader.count())]
        reader.end()
        if count != len(prepared.types):
            raise SqlError(
                errors.PROTOCOL_VIOLATION,
                f"bind message supplies {count} parameters, but the statement requires"
                f" {len(prepared.types)}",
            )
        if len(forms) not in {0, 1, count} or any(form not in {0, 1} for form in forms + formats):
            raise SqlError(errors.PROTOCOL_VIOLATION, "bind message has wrong formats")
        if portal and portal in self._portals:
            raise SqlError(errors.DUPLICATE_CURSOR, f'portal "{portal[:80]}" already exists')
        if len(self._portals) >= _MAX_PORTALS:
            raise SqlError(errors.LIMIT_EXCEEDED, f"there are {_MAX_PORTALS} portals")
        forms = column_formats(forms, count)
        parameters = [
            decode(oid, data, form)
            for oid, data, form in zip(prepared.types, raw, forms, strict=True)
        ]
        statement = prepared.statement
        if statement not in self._key_queries:
            if len(self._key_queries) > 500:
                self._key_queries.clear()
            self._key_queries[statement] = (
                None if statement.is_empty else parse_key_query(statement)
            )
        key_query = self._key_queries[statement]
        self._portals[portal] = Portal(prepared, parameters, formats, key_query)
        self._send(messages.BIND_COMPLETE)

    def _describe(self, reader: MessageReader) -> None:
        kind, name = reader.letter(), reader.text()
        reader.end()
        if kind == b"S":
            assert self.session is not None
            self._run(self._describe_statement(self.session.prepared_statement(name)))
        elif kind == b"P":
            assert self.session is not None
            cursor = self.session.cursors.get(name)
            if name not in self._portals and cursor is not None:  # of DECLARE
                self._send(messages.row_description(describe(cursor.source.schema)))
                return
            portal = self._portal(name)
            if portal.outcome is None and self._answers_key_portal(portal):
                self._describe_rows(portal)
            else:
                self._run(self._describe_portal(portal))
        else:
            raise ProtocolError("a description is of a statement or a portal")

    async def _describe_statement(self, prepared: Prepared) -> None:
        assert self.session is not None
        types, schema = await self.session.describe(prepared.statement, prepared.types)
        columns = None if schema is None else messages.row_description(describe(schema))
        self._send(messages.parameter_description(types), columns or messages.NO_DATA)

    async def _describe_portal(self, portal: Portal) -> None:
        """Run the portal's query, since its rows are the surest way to know their columns."""
        if portal.outcome is None:
            portal.outcome = await self._outcome(portal)
        self._describe_rows(portal)

    def _describe_rows(self, portal: Portal) -> None:
        outcome = portal.outcome
        if isinstance(outcome, ResultRows | Changes | Fetched):
            self._formats_for(portal, len(outcome.schema))
            self._send(messages.row_description(describe(outcome.schema, portal.formats)))
        else:
            self._send(messages.NO_DATA)

    def _answers_key_portal(self, portal: Portal) -> bool:
        """Look up a portal's row, if it is a look-up by key."""
        assert self.session is not None
        query = portal.key_query
        if query is None or not self._may_look_up(query):
            return False
        try:
            found = self._context.lookups.find(
                query,
                portal.parameters,
                lambda count: self._formats_for(portal, count),
                self.session.settings.zone,
            )
        except HeadraceError:
            return False
        if found is None:
            return False
        portal.outcome = Fetched(found.schema, [found.message] if found.message else [])
        return True

    def _formats_for(self, portal: Portal, count: int) -> Sequence[int]:
        if len(portal.formats) not in {0, 1, count}:
            raise SqlError(errors.PROTOCOL_VIOLATION, "bind message has wrong formats")
        return column_formats(portal.formats, count)

    async def _outcome(self, portal: Portal) -> Outcome | None:
        assert self.session is not None
        prepared = portal.prepared
        if prepared.statement.is_empty:
            return None
        return await self.session.execute(prepared.statement, prepared.types, portal.parameters)

    def _execute(self, reader: MessageReader) -> None:
        name, limit = reader.text(), reader.int32()
        reader.end()
        portal = self._portal(name)
        if portal.prepared.statement.is_empty:
            self._send(messages.EMPTY_QUERY)
            return
        if portal.outcome is None:
            self._answers_key_portal(portal)
        if isinstance(portal.outcome, Fetched) and portal.key_query is not None and portal.at == 0:
            portal.at = 1
            rows = portal.outcome.messages
            self._send(*rows, messages.command_complete(f"SELECT {len(rows)}"))
            return
        self._run(self._execute_portal(portal, limit))

    async def _execute_portal(self, portal: Portal, limit: int) -> None:
        if portal.outcome is None:
            portal.outcome = await self._outcome(portal)
        outcome = portal.outcome
        if isinstance(outcome, ResultRows):
            formats = self._formats_for(portal, outcome.table.num_columns)
            left = outcome.table.num_rows - portal.at
            count = left if limit <= 0 else min(limit, left)
            await self._send_rows(outcome.table.slice(portal.at, count), formats)
            portal.at += count
            if 0 < limit <= count and portal.at < outcome.table.num_rows:
                self._send(messages.PORTAL_SUSPENDED)
            else:
                self._send(messages.command_complete(_tag(outcome, count)))
        elif isinstance(outcome, Fetched):
            self._send(
                *outcome.messages, messages.command_complete(f"FETCH {len(outcome.messages)}")
            )
            outcome.messages = []
        elif isinstance(outcome, Changes):
            await self._send_changes(outcome, self._formats_for(portal, len(outcome.schema)))
        elif isinstance(outcome, Copy):
            await self._send_copy(outcome)
        elif isinstance(outcome, Done):
            self._send_done(outcome)

    def _portal(self, name: str) -> Portal:
        portal = self._portals.get(name)
        if portal is None:
            raise SqlError(errors.INVALID_CURSOR, f'portal "{name[:80]}" does not exist')
        return portal

    def _close(self, reader: MessageReader) -> None:
        assert self.session is not None
        kind, name = reader.letter(), reader.text()
        reader.end()
        if kind == b"S":
            self.session.prepared.pop(name, None)
        elif kind == b"P":
            self._portals.pop(name, None)
        else:
            raise ProtocolError("a statement or a portal is closed")
        self._send(messages.CLOSE_COMPLETE)

    def _flush(self, reader: MessageReader) -> None:
        reader.end()  # everything is sent at once

    def _sync(self) -> None:
        assert self.session is not None
        self._skips_to_sync = False
        if self.session.status == IDLE:
            self._portals.clear()
        self._ready()


_EXTENDED: dict[bytes, Callable[[PostgresConnection, MessageReader], None]] = {
    b"P": PostgresConnection._parse,  # noqa: SLF001 - the table of this class's own messages
    b"B": PostgresConnection._bind,  # noqa: SLF001
    b"D": PostgresConnection._describe,  # noqa: SLF001
    b"E": PostgresConnection._execute,  # noqa: SLF001
    b"C": PostgresConnection._close,  # noqa: SLF001
    b"H": PostgresConnection._flush,  # noqa: SLF001
}


def _tag(outcome: ResultRows, count: int | None = None) -> str:
    number = outcome.table.num_rows if count is None else count
    return f"{outcome.word} {number}" if outcome.word in {"SELECT", "FETCH"} else outcome.word


def _options(text: str) -> list[tuple[str, str]]:
    """The settings in the start's `options`: `-c name=value`, with a backslash before a space."""
    settings = []
    for part in text.replace("\\ ", "\0").split():
        name, separator, value = part.removeprefix("--").removeprefix("-c").partition("=")
        if separator:
            settings.append((name.replace("-", "_"), value.replace("\0", " ")))
    return settings
