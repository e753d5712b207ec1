"""SQL over views: sends queries to a process of their own and reads their rows.

`query_process.py` is that process. It is started with the first query, shared by all threads of
this process, and started again if it is ended. DuckDB is imported there alone.

`reader.Snapshot.sql` and `reader.ViewReader.sql` run queries here; SQL in pipelines is in
`headrace.sql`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.durations import to_us
from headrace.errors import BadQuery, HeadraceError, InputError, RetryError
from headrace.log.values import Duration
from headrace.views.statement import MAX_QUERY_BYTES, took_too_long

MAX_SQL_ROWS = 1_000_000
_GRACE_S = 5.0
"""How long after its limit a query's answer may come, before its process is given up."""
_START_S = 30.0
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_PROGRAM = """
import sys
class WithoutPandas:
    "pyarrow imports pandas if it is there, which takes longer than everything else."
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "pandas":
            raise ImportError(name)
sys.meta_path.insert(0, WithoutPandas)
from headrace.views.query_process import main
main()
"""
_LENGTHS = struct.Struct(">QQ")


@dataclass(frozen=True)
class SqlLimits:
    """The limits of one query: each ends it with an error that names it."""

    timeout_s: float = 10.0
    max_rows: int = MAX_SQL_ROWS
    max_bytes: int = 256 << 20
    """The size of the result, as Arrow data."""
    memory_bytes: int = 512 << 20
    """What the query may take beyond the views themselves."""


@dataclass(frozen=True)
class SqlScope:
    """What a query may read, if not all views and nothing else."""

    views: frozenset[str] | None = None
    script: Sequence[str] = ()
    """Statements that make other tables and functions, for this query alone. They are run as they
    are: nothing that a user wrote belongs into them.
    """
    tables: frozenset[str] = frozenset()
    """The tables that the script makes, each with its schema."""
    functions: frozenset[str] = frozenset()


_EVERYTHING = SqlScope()


class Cancellation:
    """Ends a query from another thread. It may be used for one query only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def attach(self, connection: socket.socket | None) -> None:
        """Name the connection of the running query, None when it has ended."""
        with self._lock:
            self._connection = connection
            if self.is_cancelled and connection is not None:
                raise EOFError("it was cancelled")


@dataclass(frozen=True)
class SqlResult:
    """The rows of a query, and the tick of each view of the store."""

    rows: pa.Table
    ticks: dict[str, int]


def sql_limits(timeout: Duration, max_rows: int) -> SqlLimits:
    return SqlLimits(timeout_s=to_us(timeout, what="timeout") / 1_000_000, max_rows=max_rows)


def run_query(
    path: Path,
    query: str,
    parameters: Sequence[Any] = (),
    *,
    limits: SqlLimits,
    ticks: Mapping[str, int] | None = None,
    scope: SqlScope = _EVERYTHING,
    cancellation: Cancellation | None = None,
    only_schema: bool = False,
) -> SqlResult:
    """The result of one SELECT over the views of a store, all as of one commit.

    Args:
        path: The store's file.
        query: The SELECT.
        parameters: The values of its `?` placeholders.
        limits: Its limits.
        ticks: Earlier ticks at which views are to be read; the newest commit if omitted.
        scope: What it may read.
        cancellation: Ends it.
        only_schema: Whether only the columns of the result are wanted.

    Raises:
        BadQuery: The query is not allowed, cannot run, passes a limit, or was cancelled.
        UnknownView: It reads a view that does not exist.
        ChangesGone: A view cannot be read at its tick any more.
        RetryError: A view is still being loaded.

    """
    if len(query) > MAX_QUERY_BYTES:
        raise BadQuery(
            f"The query has {len(query):,} characters; the limit is {MAX_QUERY_BYTES:,}.",
            fix="shorten it; pass long lists as a table of values, or aggregate in the pipeline.",
        )
    message = QueryMessage(
        {
            "path": str(path.absolute()),
            "query": query,
            "timeout_s": limits.timeout_s,
            "max_rows": limits.max_rows,
            "max_bytes": limits.max_bytes,
            "memory_bytes": limits.memory_bytes,
            "ticks": None if ticks is None else dict(ticks),
            "views": None if scope.views is None else sorted(scope.views),
            "script": list(scope.script),
            "tables": sorted(scope.tables),
            "functions": sorted(scope.functions),
            "only_schema": only_schema,
        },
        table_bytes(_parameter_row(parameters)) if parameters else b"",
    )
    process = _process()
    cancellation = cancellation or Cancellation()
    try:
        answer = process.ask(message, limits.timeout_s + _GRACE_S, cancellation)
    except (OSError, EOFError):  # it was ended meanwhile; queries change nothing
        if cancellation.is_cancelled:
            raise BadQuery("The query was cancelled.") from None
        answer = _retry(message, limits, process, cancellation)
    if "error" in answer.head:
        raise _error(answer.head)
    return SqlResult(table_from_bytes(answer.payload), answer.head["ticks"])


def _retry(
    message: QueryMessage, limits: SqlLimits, failed: _ProcessHandle, cancellation: Cancellation
) -> QueryMessage:
    """Ask again, in another process if the one that failed is being ended."""
    failed.wait_for_end()
    try:
        return _process().ask(message, limits.timeout_s + _GRACE_S, cancellation)
    except TimeoutError:
        raise took_too_long(limits.timeout_s) from None
    except (OSError, EOFError) as error:
        raise RetryError(
            f"The process that runs queries ended: {str(error) or type(error).__name__}.",
            fix="try again.",
        ) from None


def _parameter_row(parameters: Sequence[Any]) -> pa.Table:
    columns = []
    for number, value in enumerate(parameters, 1):
        try:
            columns.append(pa.array([value]))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise InputError(
                f"The parameter {number} of the query, {str(value)[:80]!r}, cannot be passed:"
                f" {error}.",
                fix="pass a text, a number, a date, a time or None.",
            ) from None
    return pa.Table.from_arrays(columns, names=[str(number) for number in range(len(columns))])


def mentions(query: str, view: str) -> bool:
    """Whether a query's text contains the name of a view, quoted or not. It may mean something
    else there, such as a column.
    """
    return re.search(rf"(?<![\w.]){re.escape(view)}(?![\w.])", query, re.IGNORECASE) is not None


def check_names(columns: Sequence[str]) -> None:
    """Refuse a result with two columns of one name: rows are written as objects, and one of the
    two would be lost.
    """
    for index, name in enumerate(columns):
        if name in columns[:index]:
            raise BadQuery(
                f"The query's result has two columns {name!r}.",
                fix="name the columns instead of *, and rename one of these: … AS other.",
            )


# The process


class _ProcessHandle:
    """The process that runs this process's queries. Threads may share it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {
            name: value for name, value in os.environ.items() if name.startswith("HEADRACE_SQL_")
        }
        # Other threads would make it unsafe to fork.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self.pid == os.getpid() and self._process.poll() is None

    def ask(
        self, message: QueryMessage, timeout_s: float, cancellation: Cancellation
    ) -> QueryMessage:
        """Send a query and wait for its answer. TimeoutError, OSError or EOFError if none comes."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                socket.send_fds(self._control, [b"q"], [theirs.fileno()])
            ours.settimeout(timeout_s + _START_S)
            cancellation.attach(ours)
            try:
                write_message(ours, message)
                return read_message(ours)
            finally:
                cancellation.attach(None)

    def wait_for_end(self) -> None:
        """Wait a moment for a process that was killed: it may still look alive."""
        if self.pid == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)

    def close(self) -> None:
        self._control.close()
        if self.pid != os.getpid():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
            return
        self._process.kill()
        self._process.wait()


_start_lock = threading.Lock()
_handles: list[_ProcessHandle] = []


def _process() -> _ProcessHandle:
    with _start_lock:
        if _handles and not _handles[0].is_alive():
            _handles.pop().close()
        if not _handles:
            _handles.append(_ProcessHandle())
        return _handles[0]


@atexit.register
def end_process() -> None:
    """End the process that runs queries. The next query starts another."""
    while _handles:
        _handles.pop().close()


# Messages


@dataclass(frozen=True)
class QueryMessage:
    """What goes over the socket: a head of plain values, and Arrow data."""

    head: dict[str, Any]
    payload: bytes | memoryview = b""


def write_message(connection: socket.socket, message: QueryMessage) -> None:
    head = json.dumps(message.head).encode()
    connection.sendall(_LENGTHS.pack(len(head), len(message.payload)) + head)
    connection.sendall(message.payload)


def read_message(connection: socket.socket) -> QueryMessage:
    """The next message. EOFError if the other side ends before it is complete."""
    head_bytes, payload_bytes = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    head = json.loads(bytes(_read(connection, head_bytes)))
    return QueryMessage(head, _read(connection, payload_bytes))


def _read(connection: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    received = 0
    while received < size:
        count = connection.recv_into(data[received:])
        if not count:
            raise EOFError("it ended in the middle of an answer")
        received += count
    return data


def table_bytes(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def table_from_bytes(data: bytes | memoryview) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_all()


def error_message(error: HeadraceError) -> QueryMessage:
    return QueryMessage({"error": type(error).__name__, "attributes": vars(error)})


def _error(head: Mapping[str, Any]) -> HeadraceError:
    kind = getattr(errors, head["error"], HeadraceError)
    error: HeadraceError = kind.__new__(kind)
    HeadraceError.__init__(error, head["attributes"]["message"], fix=head["attributes"]["fix"])
    vars(error).update(head["attributes"])
    return error
