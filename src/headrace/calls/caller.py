"""The caller of one call: reads the rows that wait, calls the function, and records what it says.

    requests ─▶ ready ─▶ a worker calls: its answer fits ───────▶ done ─▶ one transaction:
                 ▲          │ it failed, or does not fit                answers with their
                 └─ pause ◀─┤                                           rows, dead letters,
                            └ after its retries, or refused ─▶ done     progress

Calls run in an event loop of the caller's own thread; the log is read and written in a second
thread (`recorder`), so neither waits for the other. A process that dies between an answer and its
record asks again with the same idempotency key; an answer that is recorded is never asked for
again. A newer caller of the same pipeline fences this one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from threading import Event
from typing import Any, Self

from headrace.calls.cache import AnswerCache, argument_key
from headrace.calls.call import Call, RequestContext
from headrace.calls.recorder import NOT_FITTING, Exchanged, Recorder, RequestFate
from headrace.calls.requests import Request
from headrace.error_policy import STOP
from headrace.errors import (
    CallFailed,
    CallRefused,
    ConfigurationError,
    FencedError,
    HeadraceError,
    RetryError,
)
from headrace.log.api import Log
from headrace.retry import Backoff, CircuitBreaker

logger = logging.getLogger("headrace.calls")
BACKOFF = Backoff(first_s=0.5, longest_s=30.0)
POLL_S = 0.1
GATHER_S = 0.02
"""Answers that come within this time are recorded together."""
GRACE_S = 5.0
"""How much longer than its timeout a call may take to end before its worker is given up."""
MAX_BLOCKED_S = 30.0
"""How much longer than a timeout the function may hold the event loop before the run ends."""
_MIN_OPEN = 1_000
_OPEN_PER_CALL = 4


@dataclass
class CallerStatus:
    """The counts of this run, and the last failure."""

    answered: int = 0
    cached: int = 0
    failed: int = 0
    """Tries that failed."""
    dead: int = 0
    open: int = 0
    in_flight: int = 0
    is_breaker_open: bool = False
    error: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.answered:,} answered"]
        if self.cached:
            parts.append(f"{self.cached:,} from the cache")
        parts.append(f"{self.open:,} open ({self.in_flight:,} in flight)")
        if self.dead:
            parts.append(f"{self.dead:,} dead letters")
        if self.is_breaker_open:
            parts.append("paused by its circuit breaker")
        if self.error is not None:
            parts.append(f"last failure: {self.error}")
        return ", ".join(parts)


@dataclass(eq=False, slots=True)
class _Attempted:
    """Rows that are asked about in one call, and how often they were."""

    requests: list[Request]
    attempts: int = 0


@dataclass(eq=False)
class _Running:
    """A call that is being made."""

    rows: _Attempted
    started_s: float
    was_probe: bool
    is_given_up: bool = False


class Caller:
    """The caller of one call. `open` takes it over; `run` works until it is stopped."""

    def __init__(self, recorder: Recorder, *, breaker: CircuitBreaker | None = None) -> None:
        call = recorder.call
        self.call = call
        self.recorder = recorder
        self.status = CallerStatus()
        self.is_quiet = False
        """Whether every request that the log has had a recorded fate when it was last read."""
        self._breaker = breaker or CircuitBreaker(
            failures_to_open=CircuitBreaker.FAILURES_TO_OPEN + call.concurrency
        )
        self._cache = AnswerCache(call.cache_us) if call.cache_us else None
        self._open_limit = max(_MIN_OPEN, _OPEN_PER_CALL * call.concurrency * (call.batch or 1))
        self._heartbeat_s = time.monotonic()
        self._client: Any = None
        self._names = set(call.schema.names)
        self._reset()

    def _reset(self) -> None:
        """Nothing is known of any request."""
        self._ready: deque[Request] = deque()
        self._again: deque[_Attempted] = deque()
        self._done: list[RequestFate] = []
        self._held: dict[int, dict[int, RequestFate]] = {}
        self._order: dict[int, deque[int]] = {}
        self._followers: dict[str, list[Request]] = {}
        self._open = 0
        self._running: dict[asyncio.Task[None], _Running] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_probing = False
        self._next_call_s = 0.0
        self._failure: BaseException | None = None

    @classmethod
    def open(
        cls,
        log: Log,
        call: Call,
        *,
        is_own_tick: Callable[[int], bool] = lambda _tick: False,
        breaker: CircuitBreaker | None = None,
    ) -> Self:
        """Take over from an older caller, and read how far it came. The topics exist.

        Args:
            log: The log.
            call: The call.
            is_own_tick: Whether a tick took in nothing but rows that move event time.
            breaker: The circuit breaker; a new one by default.

        """
        caller = cls(Recorder.open(log, call, is_own_tick=is_own_tick), breaker=breaker)
        if caller._cache is not None:
            caller._cache.reload(log, call, time.time_ns() // 1_000)
        return caller

    @property
    def blocked_s(self) -> float:
        """How long the event loop has not come round."""
        return time.monotonic() - self._heartbeat_s

    def check_blocked(self) -> None:
        """Raise CallFailed if the function holds the event loop, so that no timeout can end it."""
        if self._running and self.blocked_s > self.call.timeout_s + MAX_BLOCKED_S:
            running = min(self._running.values(), key=lambda each: each.started_s)
            raise CallFailed(
                step=self.call.name,
                row=running.rows.requests[0].row(),
                cause=f"its function has held the event loop for {self.blocked_s:.0f} s",
                fix=(
                    "await what takes time: use an asynchronous client, or"
                    " asyncio.to_thread(…) around what blocks. The row is asked about again when"
                    " the pipeline runs next."
                ),
            )

    # Running

    def run(self, stop: Event, *, until_quiet: bool = False) -> None:
        """Call and record until `stop` is set, or until no request is open.

        Raises:
            FencedError: A newer caller has taken over.
            CallFailed: A row has no answer, and the call has `errors="stop"`.

        """
        self._heartbeat_s = time.monotonic()
        # A call that ignores its cancellation may never end: asyncio.run would wait for it.
        loop = asyncio.new_event_loop()
        try:
            with ThreadPoolExecutor(1, f"call {self.call.name}") as log_thread:
                loop.run_until_complete(self._run(stop, log_thread, until_quiet=until_quiet))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    async def _run(self, stop: Event, log_thread: ThreadPoolExecutor, *, until_quiet: bool) -> None:
        loop = asyncio.get_running_loop()
        self._reset()
        self._wake = asyncio.Event()
        self._beat()
        is_failing = False
        async with AsyncExitStack() as stack:
            await self._open_client(stack)
            workers = {loop.create_task(self._work()) for _ in range(self.call.concurrency)}
            if self.recorder.requests.open_rows:  # of an earlier run; they are read again
                await loop.run_in_executor(log_thread, self.recorder.load)
            try:
                while not stop.is_set() and self._failure is None:
                    self._replace_stuck(workers)
                    done, self._done = self._done, []
                    max_rows = max(0, self._open_limit - self._open)
                    try:
                        exchanged = await loop.run_in_executor(
                            log_thread, self.recorder.exchange, done, max_rows
                        )
                        is_failing = False
                    except RetryError as error:
                        self._done = done + self._done
                        if not is_failing:
                            logger.warning(
                                "The answers of %s cannot be recorded now. Trying again: %s",
                                self.call.name,
                                error,
                            )
                        is_failing = True
                        await asyncio.sleep(BACKOFF.pause_s(1))
                        continue
                    self._take(exchanged, len(done))
                    if until_quiet and self.is_quiet:
                        break
                    await self._pause(busy=bool(done or exchanged.requests))
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.wait(workers, timeout=1.0)
                if self._done and not isinstance(self._failure, FencedError):
                    with suppress(HeadraceError):  # they are asked about again
                        await loop.run_in_executor(
                            log_thread, self.recorder.exchange, self._done, 0
                        )
        if self._failure is not None:
            raise self._failure

    def _beat(self) -> None:
        """Note that the event loop comes round, twice a second."""
        self._heartbeat_s = time.monotonic()
        asyncio.get_running_loop().call_later(0.5, self._beat)

    async def _open_client(self, stack: AsyncExitStack) -> None:
        if self.call.client is None:
            return
        try:
            self._client = await stack.enter_async_context(self.call.client())
        except Exception as error:
            raise ConfigurationError(
                f"The client of the step {self.call.name!r} could not be opened:"
                f" {type(error).__name__}: {error}.",
                fix="correct what client= returns, or what it connects to, and run again.",
            ) from error

    async def _pause(self, *, busy: bool) -> None:
        """Gather answers for a moment; if nothing goes on, wait for one."""
        await asyncio.sleep(GATHER_S)
        if not busy and not self._done:
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)

    def _take(self, exchanged: Exchanged, settled: int) -> None:
        """Take in what the log's thread has read."""
        self._open += len(exchanged.requests) - settled + len(exchanged.misfits)
        self.status.dead += exchanged.dead
        now_us = time.time_ns() // 1_000
        for request in exchanged.requests:
            if self.call.ordered:
                self._order.setdefault(request.partition, deque()).append(request.offset)
            self._enqueue(request, now_us)
        for request, reason in exchanged.misfits:
            self._fail(_Attempted([request], self.call.retries), reason)
        status = self.status
        status.open, status.in_flight = self._open, len(self._running)
        status.is_breaker_open = self._breaker.is_open
        self.is_quiet = exchanged.is_quiet and not self._open and not self._done
        self._wake_workers(len(self._ready) + len(self._again))

    def _enqueue(self, request: Request, now_us: int) -> None:
        """Queue a request, unless the cache has its answer or another one asks the same."""
        if self._cache is not None:
            key = argument_key(request.arguments)
            known = self._cache.get(key, now_us)
            if known is not None:
                self.status.cached += 1
                self._finish(RequestFate(request, known[0], known[1]))
                return
            if key in self._followers:
                self._followers[key].append(request)
                return
            self._followers[key] = []
        self._ready.append(request)

    def _wake_workers(self, count: int) -> None:
        while count > 0 and self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                count -= 1

    def _replace_stuck(self, workers: set[asyncio.Task[None]]) -> None:
        """Give up calls that have ignored their cancellation, and start other workers."""
        limit_s = time.monotonic() - self.call.timeout_s - GRACE_S
        for worker, running in list(self._running.items()):
            if running.started_s < limit_s and not running.is_given_up:
                running.is_given_up = True
                del self._running[worker]
                self._is_probing &= not running.was_probe
                self._fail(
                    running.rows, f"no answer within {self.call.timeout_s:g} s, nor an end after it"
                )
                workers.add(asyncio.get_running_loop().create_task(self._work()))
        for worker in [worker for worker in workers if worker.done()]:
            workers.discard(worker)
            if not worker.cancelled() and (error := worker.exception()) is not None:
                self._failure = error

    # Calling

    async def _work(self) -> None:
        """One of `concurrency` workers."""
        worker = asyncio.current_task()
        assert worker is not None
        while True:
            rows, is_probe = await self._next_rows()
            running = self._running[worker] = _Running(rows, time.monotonic(), is_probe)
            error: BaseException | None = None
            returned: Any = None
            try:
                async with asyncio.timeout(self.call.timeout_s):
                    returned = await self._called(rows)
            except asyncio.CancelledError as cancelled:
                if worker.cancelling():
                    raise
                error = cancelled  # something within the function was cancelled
            except TimeoutError as timeout:
                error = timeout
            except Exception as raised:
                error = raised
            if running.is_given_up:
                return
            del self._running[worker]
            if is_probe:
                self._is_probing = False
            if error is None:
                self._breaker.record_success()
                self._accept(rows, returned)
            else:
                self._handle_error(rows, error, running)
            self._wake.set()

    def _called(self, rows: _Attempted) -> Any:
        """What is awaited: the user's function, over its arguments."""
        call, requests = self.call, rows.requests
        given: Any
        if call.batch is None:
            given = dict(requests[0].arguments)
        else:
            given = [dict(request.arguments) for request in requests]
        if not call.takes_context:
            return call.function(given)
        keys = tuple(request.key for request in requests)
        return call.function(given, RequestContext(keys, rows.attempts + 1, self._client))

    async def _next_rows(self) -> tuple[_Attempted, bool]:
        """The rows of the next call, when it may be made: limits and the circuit breaker allow it.
        The second value is whether it probes an open circuit.
        """
        while True:
            if not self._ready and not self._again:
                future = asyncio.get_running_loop().create_future()
                self._waiting.append(future)
                await future
                continue
            is_probe = self._breaker.is_open
            if is_probe and (self._is_probing or self._breaker.wait_s() > 0):
                await asyncio.sleep(min(1.0, max(0.05, self._breaker.wait_s())))
                continue
            if self.call.max_per_second is not None:
                now_s = time.monotonic()
                if now_s < self._next_call_s:
                    await asyncio.sleep(self._next_call_s - now_s)
                    continue
                self._next_call_s = max(now_s, self._next_call_s) + 1 / self.call.max_per_second
            self._is_probing |= is_probe
            if self._again:
                return self._again.popleft(), is_probe
            count = min(self.call.batch or 1, len(self._ready))
            return _Attempted([self._ready.popleft() for _ in range(count)]), is_probe

    def _accept(self, rows: _Attempted, returned: Any) -> None:
        """Take the answers that fit; the others are asked for again."""
        call, now_us = self.call, time.time_ns() // 1_000
        answers = [returned] if call.batch is None else returned
        if not isinstance(answers, list | tuple) or len(answers) != len(rows.requests):
            count = (
                f"{len(answers)}" if isinstance(answers, list | tuple) else type(answers).__name__
            )
            reason = f"it returned {count} for {len(rows.requests)} rows, not a list with one each"
            self._fail(rows, reason)
            return
        for request, answer in zip(rows.requests, answers, strict=True):
            misfit = self._misfit(answer)
            if misfit is not None:
                self._fail(_Attempted([request], rows.attempts), misfit)
                continue
            self.status.answered += 1
            self._finish(RequestFate(request, answer, now_us))
            if self._cache is not None:
                key = argument_key(request.arguments)
                self._cache.put(key, answer, now_us)
                for follower in self._followers.pop(key, ()):
                    self.status.cached += 1
                    self._finish(RequestFate(follower, answer, now_us))

    def _misfit(self, answer: Any) -> str | None:
        """Why an answer does not fit the schema; None if it does, as far as its types say."""
        if not isinstance(answer, Mapping):
            return f"it returned a {type(answer).__name__}, not a dictionary"
        names = self.call.schema.names
        if answer.keys() != self._names:
            more = [name for name in answer if name not in names]
            if more:
                return f"it returned {more[0]!r}, which the schema does not have"
        for converter in self.call.converters:
            if converter.name not in answer:
                return f"it returned no {converter.name!r}"
            value = answer[converter.name]
            if type(value) not in converter.exact:
                try:
                    converter.array([value])
                except NOT_FITTING as error:
                    return f"{converter.name!r} does not fit: {error}"
        return None

    # Failures

    def _handle_error(self, rows: _Attempted, error: BaseException, running: _Running) -> None:
        """A call raised, or took too long."""
        if isinstance(error, CallRefused):
            self._breaker.record_success()  # the service is there
            for request in rows.requests:
                self._give_up(request, f"refused: {error.message}")
            return
        reason = (
            f"no answer within {self.call.timeout_s:g} s"
            if isinstance(error, TimeoutError) and not str(error)
            else f"{type(error).__name__}: {error}"
        )
        wait_s = float(getattr(error, "wait_s", 0.0))
        if running.was_probe or not self._breaker.is_open:
            self._breaker.record_failure(wait_s)
            if self._breaker.is_open:
                logger.warning(
                    "The call %s is paused for %.0f s after %d failures in a row: %s",
                    self.call.name,
                    self._breaker.wait_s(),
                    self._breaker.failures,
                    reason,
                )
        self._fail(rows, reason, wait_s=wait_s)

    def _fail(self, rows: _Attempted, reason: str, *, wait_s: float = 0.0) -> None:
        """Ask again after a pause, or give up. Of a batch, each row has a last try of its own."""
        self.status.failed += 1
        self.status.error = reason
        rows.attempts += 1
        if rows.attempts > self.call.retries:
            if len(rows.requests) == 1:
                tries = "1 try" if rows.attempts == 1 else f"{rows.attempts} tries"
                self._give_up(rows.requests[0], f"no answer after {tries}; the last: {reason}")
                return
            again = [_Attempted([each], max(0, self.call.retries)) for each in rows.requests]
        else:
            again = [rows]
        pause_s = BACKOFF.pause_s(rows.attempts, min_s=wait_s)
        asyncio.get_running_loop().call_later(pause_s, self._retry, again)

    def _retry(self, again: list[_Attempted]) -> None:
        self._again.extend(again)
        self._wake_workers(len(again))

    def _give_up(self, request: Request, reason: str) -> None:
        """The row has no answer: `errors` says what becomes of it."""
        if self._cache is not None:  # the first of those that follow it is asked about next
            followers = self._followers.pop(argument_key(request.arguments), [])
            now_us = time.time_ns() // 1_000
            for follower in followers:
                self._enqueue(follower, now_us)
            self._wake_workers(len(followers))
        if self.call.errors == STOP:
            self._failure = CallFailed(
                step=self.call.name,
                row=request.row(),
                cause=reason,
                fix=(
                    "correct the function, the service or the row and run again, which asks again;"
                    ' or send such rows to dead letters with errors="divert".'
                ),
            )
        else:
            self._finish(RequestFate(request, None, time.time_ns() // 1_000, reason))
        self._wake.set()

    def _finish(self, fate: RequestFate) -> None:
        """Have a fate recorded, in the order of the requests if that is kept."""
        if not self.call.ordered:
            self._done.append(fate)
            return
        partition = fate.request.partition
        held, order = self._held.setdefault(partition, {}), self._order[partition]
        # A fate for the second time: the first answer did not fit, and others have gone on.
        if not order or fate.request.offset < order[0]:
            self._done.append(fate)
            return
        held[fate.request.offset] = fate
        while order and order[0] in held:
            self._done.append(held.pop(order.popleft()))
