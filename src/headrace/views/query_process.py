"""The process in which SQL over views runs. `sql.py` starts one for each process that queries
views, and talks to it over a socket.

    sql.py ──a socket per query──▶ this process: replicas, which follow the stores
                                        │ fork, once the query's views are at one tick
                                        ▼
                                   the query's own process ──▶ its rows, straight to sql.py

The query's process is a copy of this one, memory included, made in a few milliseconds. It can be
killed at any moment without any effect on the replica or on another query.

This process has one thread. Views are loaded a slice at a time, so that queries over views that are
loaded already are not delayed by those that wait.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import BadQuery, HeadraceError, RetryError
from headrace.views.query_execution import (
    QueryRequest,
    execute,
    needed_too_much_memory,
    set_limits,
)
from headrace.views.replica import ViewReplica
from headrace.views.sql import (
    QueryMessage,
    error_message,
    mentions,
    read_message,
    table_bytes,
    table_from_bytes,
    write_message,
)
from headrace.views.statement import took_too_long

_DEFAULT_VIEWS_MB = 1_024
_MAX_RUNNING = 4
_MAX_REPLICAS = 16
_FOLLOW_S = 0.5
_WARM_S = 60.0
"""How long views follow the store by themselves after a query."""
_SEND_S = 30.0


@dataclass
class _Query:
    """One query, from its request to the end of its process."""

    connection: socket.socket
    path: Path
    request: QueryRequest
    ticks: dict[str, int] | None
    only_views: frozenset[str] | None
    """The views that it may read, if not all."""
    deadline: float
    waits_for: list[str] = field(default_factory=list)


class _QueryProcess:
    """The state of this process."""

    def __init__(self, control: socket.socket, max_bytes: int) -> None:
        self._control = control
        self._max_bytes = max_bytes
        self._replicas: dict[Path, tuple[tuple[int, int], ViewReplica]] = {}
        self._waiting: list[_Query] = []
        self._running: dict[int, _Query] = {}
        self._loads: dict[tuple[Path, str], Iterator[int]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._wake_up, wake_up_end = socket.socketpair()
        for end in (self._wake_up, wake_up_end):
            end.setblocking(False)
        self._selector.register(self._wake_up, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_up_end.fileno(), warn_on_full_buffer=False)
        self._wake_up_end = wake_up_end
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._followed_at = time.monotonic()

    def run(self) -> None:
        """Serve queries until the other end of the control socket closes."""
        try:
            while True:
                for key, _ in self._selector.select(self._pause_s()):
                    if key.fileobj is self._wake_up:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_up.recv(4_096)
                    elif key.fileobj is not self._control:
                        self._cancel(key.data)
                    elif not self._receive():
                        return
                self._reap()
                self._start_queries()
                self._load_slice()
                self._follow()
        finally:
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _pause_s(self) -> float | None:
        if self._loads:
            return 0.0
        if self._waiting:
            return 0.05
        return _FOLLOW_S if self._warm_views() else None

    # Queries

    def _receive(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            return False
        connection = socket.socket(fileno=descriptors[0])
        try:
            connection.settimeout(_SEND_S)
            message = read_message(connection)
            head = message.head
            request = QueryRequest(
                query=head["query"],
                parameters=_parameters(message),
                timeout_s=head["timeout_s"],
                max_rows=head["max_rows"],
                max_bytes=head["max_bytes"],
                memory_bytes=head["memory_bytes"],
                script=head["script"],
                tables=head["tables"],
                functions=head["functions"],
                only_schema=head["only_schema"],
            )
        except (OSError, EOFError):
            connection.close()
            return True
        self._waiting.append(
            _Query(
                connection=connection,
                path=Path(head["path"]),
                request=request,
                ticks=head["ticks"],
                only_views=None if head["views"] is None else frozenset(head["views"]),
                deadline=time.monotonic() + request.timeout_s,
            )
        )
        return True

    def _start_queries(self) -> None:
        """Start the queries whose views are loaded, and fail those whose time is over."""
        waiting, self._waiting = self._waiting, []
        for query in waiting:
            if time.monotonic() > query.deadline:
                self._fail(query, self._waited_too_long(query))
            elif len(self._running) >= _MAX_RUNNING or any(
                (query.path, name) in self._loads for name in query.waits_for
            ):
                self._waiting.append(query)
            else:
                try:
                    if not self._start(query):
                        self._waiting.append(query)
                except HeadraceError as error:
                    self._fail(query, error)

    def _start(self, query: _Query) -> bool:
        """Bring the views of a query to the store's newest commit and fork its process. False if
        some must be loaded before.
        """
        replica = self._replica(query.path)
        with replica.reader.snapshot() as snap:
            views = {
                info.name: info.tick
                for info in snap.views()
                if query.only_views is None or info.name in query.only_views
            }
            mentioned = [name for name in views if mentions(query.request.query, name)]
            query.waits_for = replica.outdated(snap, mentioned)
            if query.waits_for:
                for name in query.waits_for:
                    self._loads.setdefault((query.path, name), replica.load(name))
                return False
            past = {
                name: query.ticks[name]
                for name in mentioned
                if query.ticks is not None and query.ticks.get(name, views[name]) != views[name]
            }
            undone = replica.past_changes(snap, past)
        ticks = {**views, **(query.ticks or {})}
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                set_limits(query.request, query.deadline)
                message = _answer(
                    query,
                    lambda: execute(replica, query.request, views, undone, query.deadline),
                    ticks,
                )
                signal.setitimer(signal.ITIMER_REAL, _SEND_S)
                write_message(query.connection, message)
            finally:
                os._exit(0)
        self._running[pid] = query
        self._selector.register(query.connection, selectors.EVENT_READ, pid)
        return True

    def _cancel(self, pid: int) -> None:
        """End the process of a query whose connection was closed: nobody waits for its rows."""
        self._selector.unregister(self._running[pid].connection)
        os.kill(pid, signal.SIGKILL)  # it is not reaped before this process looks

    def _reap(self) -> None:
        """Answer for processes that ended without an answer."""
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            query = self._running.pop(pid)
            if query.connection in self._selector.get_map():
                self._selector.unregister(query.connection)
            if os.WIFSIGNALED(status):
                self._fail(
                    query,
                    took_too_long(query.request.timeout_s)
                    if os.WTERMSIG(status) == signal.SIGALRM
                    else needed_too_much_memory(query.request.memory_bytes),
                )
            else:
                query.connection.close()

    def _fail(self, query: _Query, error: HeadraceError) -> None:
        with contextlib.suppress(OSError):
            write_message(query.connection, error_message(error))
        query.connection.close()

    def _waited_too_long(self, query: _Query) -> HeadraceError:
        loading = [name for name in query.waits_for if (query.path, name) in self._loads]
        if loading:
            return RetryError(
                f"The view {loading[0]!r} is being loaded for queries, which takes longer than the"
                f" {query.request.timeout_s:g} seconds of this one.",
                fix="try again in a moment, or give the query a longer timeout.",
            )
        return took_too_long(query.request.timeout_s)

    # Replicas

    def _replica(self, path: Path) -> ViewReplica:
        try:
            stat = path.stat()
        except OSError:
            self._drop_replica(path)
            return ViewReplica(path, self._max_bytes)  # its reader says what is wrong
        identity = (stat.st_dev, stat.st_ino)
        known = self._replicas.get(path)
        if known is not None and known[0] == identity:
            return known[1]
        self._drop_replica(path)
        while len(self._replicas) >= _MAX_REPLICAS:
            self._drop_replica(next(iter(self._replicas)))
        replica = ViewReplica(path, self._max_bytes)
        self._replicas[path] = identity, replica
        return replica

    def _drop_replica(self, path: Path) -> None:
        for key in [key for key in self._loads if key[0] == path]:
            del self._loads[key]
        if path in self._replicas:
            self._replicas.pop(path)[1].close()

    def _load_slice(self) -> None:
        """Load one slice of the view that was requested first."""
        if not self._loads:
            return
        key, load = next(iter(self._loads.items()))
        try:
            next(load)
            self._make_room(key[0])
        except StopIteration:
            del self._loads[key]
        except HeadraceError as error:
            del self._loads[key]
            path, name = key
            failed = [
                query for query in self._waiting if query.path == path and name in query.waits_for
            ]
            self._waiting = [query for query in self._waiting if query not in failed]
            for query in failed:
                self._fail(query, error)

    def _make_room(self, loading: Path) -> None:
        """Evict the replicas of other stores while all together take too much."""
        others = [path for path in self._replicas if path != loading]
        while others and self._memory_bytes() > self._max_bytes:
            self._drop_replica(others.pop(0))

    def _memory_bytes(self) -> int:
        return sum(replica.memory_bytes() for _, replica in self._replicas.values())

    def _warm_views(self) -> dict[Path, list[str]]:
        oldest = time.monotonic() - _WARM_S
        warm = {
            path: [name for name, view in replica.views.items() if view.used_at > oldest]
            for path, (_, replica) in self._replicas.items()
        }
        return {path: names for path, names in warm.items() if names}

    def _follow(self) -> None:
        """Follow the stores between queries, so that the next one has little to catch up with."""
        if time.monotonic() - self._followed_at < _FOLLOW_S:
            return
        self._followed_at = time.monotonic()
        for path, names in self._warm_views().items():
            replica = self._replicas[path][1]
            used_at = {name: replica.views[name].used_at for name in names}
            try:
                with replica.reader.snapshot() as snap:
                    stored = {info.name for info in snap.views()}
                    for name in [name for name in names if name not in stored]:
                        replica.forget(name)
                    for name in replica.outdated(snap, [name for name in names if name in stored]):
                        replica.forget(name)
            except HeadraceError:  # the next query is told
                self._drop_replica(path)
                continue
            for name, view in replica.views.items():
                view.used_at = used_at.get(name, view.used_at)


def _parameters(message: QueryMessage) -> list[Any]:
    if not message.payload:
        return []
    return [column[0].as_py() for column in table_from_bytes(message.payload).columns]


def _answer(query: _Query, run: Any, ticks: dict[str, int]) -> QueryMessage:
    try:
        rows = run()
        return QueryMessage({"ticks": ticks}, table_bytes(rows))
    except HeadraceError as error:
        return error_message(error)
    except MemoryError:
        return error_message(needed_too_much_memory(query.request.memory_bytes))
    except Exception as error:
        return error_message(BadQuery(f"The query cannot run: {type(error).__name__}: {error}."))


def main() -> None:
    """Serve the queries of the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    megabytes = int(os.environ.get("HEADRACE_SQL_VIEWS_MB") or _DEFAULT_VIEWS_MB)
    _QueryProcess(control, megabytes << 20).run()
    os._exit(0)
