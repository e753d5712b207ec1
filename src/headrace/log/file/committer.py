"""The committer: how something becomes true. Many threads hand in requests; one of them leads and
commits them all with one sync.

A request decides under the log's lock what to do, so it always sees the newest state. The order on
disk is what makes it safe: rows, then the journal's record, then its sync, then the marker that
lets readers see it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace.errors import BugError, HeadraceError, RetryError
from headrace.log.file.commit_draft import Draft
from headrace.log.file.journal import COMMIT, encode_record
from headrace.log.file.store import Store, now_us

if TYPE_CHECKING:
    from headrace.log.file.checkpoint import Replica
    from headrace.log.file.commit_draft import Adoption
    from headrace.log.file.disk import Buffer, DiskFile


T = TypeVar("T")
INLINE_BYTES = 1 << 20
"""Up to this many bytes a commit's rows also go into the journal, and need no sync of their own."""
MAX_REQUESTS_A_GROUP = 1024
_LONGEST_WAIT_S = 0.005


class Request(Generic[T]):
    """One thread's wish: `decide` fills a draft and returns the answer."""

    def __init__(self, decide: Callable[[Draft], T], size: int) -> None:
        self.decide, self.size = decide, size
        self.answer: T | None = None
        self.error: BaseException | None = None
        self.finished = False
        self._woken = threading.Lock()
        self._woken.acquire()

    def wake(self) -> None:
        self._woken.release()

    def wait(self) -> None:
        self._woken.acquire()

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self.answer  # type: ignore[return-value]


class Committer:
    def __init__(self, store: Store, after: Callable[[], None]) -> None:
        self.store, self._after = store, after
        self.records_since_checkpoint = self.bytes_since_checkpoint = 0
        self._guard = threading.Lock()
        self._queue: deque[Request[object]] = deque()
        self._leading = False
        self._successor: Request[object] | None = None
        self._expected = 1  # requests that usually come together
        self._sync_s = 0.0
        self._arrived = threading.Semaphore(0)
        self._broken: BaseException | None = None

    def submit(self, decide: Callable[[Draft], T], *, size: int = 0) -> T:
        """Commit what `decide` drafts (about `size` bytes of rows); returns its answer when that is
        durable.
        """
        request: Request[T] = Request(decide, size)
        with self._guard:
            self._queue.append(request)  # type: ignore[arg-type]
            leads = not self._leading
            self._leading = True
        if not leads:
            self._arrived.release()
            self._wait(request)
        if not request.finished:
            self._lead()
        return request.result()

    def _wait(self, request: Request[T]) -> None:
        try:
            request.wait()
        except BaseException:  # Ctrl-C: leave the queue, and do not take the lead along
            with self._guard:
                if request in self._queue:
                    self._queue.remove(request)  # type: ignore[arg-type]
                if self._successor is request:
                    self._promote()
            raise

    def _promote(self) -> None:
        """Let the first in the queue lead; nobody, if it is empty. Holds the guard."""
        self._successor = self._queue[0] if self._queue else None
        self._leading = self._successor is not None
        if self._successor is not None:
            self._successor.wake()

    def _lead(self) -> None:
        """Commit everything that is queued, then pass the lead on, whatever happens."""
        group: list[Request[object]] = []
        try:
            self._await_companions()
            self._take(group, MAX_REQUESTS_A_GROUP)
            self._commit(group)
        except BaseException as error:  # every waiting thread must hear of it
            self._take(group, 1 - len(group))  # ours, if Ctrl-C came while we waited
            group[0].error = group[0].error or error
            for request in group[1:]:
                request.error = request.error or (
                    error if isinstance(error, Exception) else _outcome_unknown(self.store, error)
                )
        finally:
            self._pass_on(group)

    def _take(self, group: list[Request[object]], most: int) -> None:
        with self._guard:
            group += [self._queue.popleft() for _ in range(min(len(self._queue), most))]

    def _await_companions(self) -> None:
        """If others usually come at the same time, waiting a little for them is cheaper than a
        second sync.
        """
        deadline = time.perf_counter() + min(self._sync_s / 2, _LONGEST_WAIT_S)
        while len(self._queue) < self._expected:
            rest = deadline - time.perf_counter()
            if rest <= 0 or not self._arrived.acquire(timeout=rest):
                return

    def _pass_on(self, group: list[Request[object]]) -> None:
        with self._guard:
            self._expected = max(
                1,
                len(group) + len(self._queue),
                self._expected - 1 if len(group) < self._expected else 0,
            )
            self._arrived = threading.Semaphore(0)
            for request in group:
                request.finished = True
            self._promote()
        for request in group[1:]:  # the first one is ours
            request.wake()

    def _commit(self, group: list[Request[object]]) -> None:
        """The commit, step by step:

        1. under the log's lock: decide what each request does
        2. write rows into segments; sync those that the journal will not carry
        3. write the journal's records, all at once; give the lock back
        4. sync the journal: this is the commit (before the lock is given back, if staged files must
           then be moved to their places)
        5. publish how far it is durable
        """
        self._check_usable()
        with self.store.locked() as newest:
            before = newest.lsn
            try:
                drafts = self._decide(group, newest)  # 1
                self._write_rows(drafts)  # 2
                end = self._write_journal(drafts, newest)  # 3
            except BaseException:
                self._undo(newest, before)
                raise
            journal = newest.journal.file_at(newest.base)
            adoptions = [adoption for draft in drafts for adoption in draft.adoptions]
            if adoptions:
                self._sync(journal)  # 4
                self._adopt(adoptions)
            self.records_since_checkpoint, self.bytes_since_checkpoint = (
                newest.records_since_checkpoint,
                newest.lsn - newest.base,
            )
        if end > before or not self._is_published(
            end
        ):  # also if it only rests on what another process is about to make durable
            if not adoptions:
                self._sync(journal)  # 4
            self.store.marker.publish(end, synced=self.store.durable)  # 5
            self._after()

    def _is_published(self, end: int) -> bool:
        mark = self.store.marker.read()
        return mark is not None and mark.lsn >= end

    def _adopt(self, adoptions: list[Adoption]) -> None:
        """Behind the commit point: what cannot be done now is done by the next one who reads the
        journal.
        """
        try:
            for adoption in adoptions:
                self.store.adopt(adoption)
        except BaseException as error:
            self.store.forget_newest()
            if isinstance(error, Exception):
                raise _outcome_unknown(self.store, error) from error
            raise

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise RetryError(
                f"The log in {self.store.root} cannot be written any more by this process: a sync"
                f" failed ({self._broken}).",
                fix=(
                    "check the disk, then open the log again; whether the last appends are stored"
                    " will be seen then."
                ),
            ) from self._broken

    def _decide(self, group: list[Request[object]], newest: Replica) -> list[Draft]:
        drafts = []
        time_us = max(now_us(), newest.state.time_us)
        for request in group:
            draft = Draft(newest.state, time_us, inline=request.size <= INLINE_BYTES)
            try:
                request.answer = request.decide(draft)
            except HeadraceError as error:
                if draft.operations:
                    raise BugError(
                        "A commit was refused when it had begun to change the state."
                    ) from error
                request.error = error
            if draft.operations:
                drafts.append(draft)
        return drafts

    def _write_rows(self, drafts: list[Draft]) -> None:
        to_sync: dict[int, DiskFile] = {}
        for draft in drafts:
            for seal in draft.seals:
                self.store.seal(seal)
            for adoption in draft.adoptions:
                self.store.make_directory(
                    self.store.partition_directory(adoption.directory, adoption.partition)
                )
            for write in draft.writes:
                file = self.store.write_segment(write)
                if not draft.inline:
                    to_sync[id(file)] = file
        if self.store.durable:
            for file in to_sync.values():
                self.sync(file)

    def _write_journal(self, drafts: list[Draft], newest: Replica) -> int:
        """Returns the journal's new end."""
        if not drafts:
            return newest.lsn
        mark = self.store.marker.read()
        durable = mark.lsn if mark and self.store.durable else 0
        buffers: list[Buffer] = []
        lsn = newest.lsn
        for draft in drafts:
            blob = (
                [buffer for write in draft.writes for buffer in write.buffers]
                if draft.inline
                else []
            )
            record = encode_record(
                lsn,
                COMMIT,
                draft.commit,
                durable,
                {"t": draft.time_us, "ops": draft.operations},
                blob,
            )
            buffers += record
            lsn += sum(map(len, record))
        journal = newest.journal.file_at(newest.base)
        newest.lsn = newest.base + journal.write(buffers, newest.lsn - newest.base)
        newest.records_since_checkpoint += len(drafts)
        return newest.lsn

    def _undo(self, newest: Replica, before: int) -> None:
        """Nothing of a failed group may stay: neither in the journal nor in this process's mind."""
        try:
            journal = newest.journal.file_at(newest.base)
            if journal.size() > before - newest.base:
                journal.truncate(before - newest.base)
                journal.sync()  # or it could come back when power is lost
        finally:
            self.store.forget_newest()

    def _sync(self, journal: DiskFile) -> None:
        if not self.store.durable:
            return
        started = time.perf_counter()
        self.sync(journal)
        self._sync_s = 0.8 * self._sync_s + 0.2 * (time.perf_counter() - started)

    def sync(self, file: DiskFile) -> None:
        """The system says once that a sync failed, and then takes the pages for written: whoever
        tried again would be told a lie. So this is the end of writing.
        """
        try:
            file.sync()
        except (OSError, HeadraceError) as error:
            self._broken = error
            raise _outcome_unknown(self.store, error) from error


def _outcome_unknown(store: Store, error: BaseException) -> RetryError:
    return RetryError(
        f"Whether this is stored in {store.root} is not known: {error}",
        fix=(
            "check the disk, open the log again and look; a producer with an id can simply"
            " repeat it."
        ),
    )
