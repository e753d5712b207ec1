"""The committer: group commit. Many threads submit requests; one of them leads and commits all that
are queued with one sync of the journal.

A request decides what to do under the log's lock, so it always sees the newest state. The order of
writes makes a commit atomic: rows into segments, a record into the journal, a sync of the journal
(the commit point), and then the durable marker, up to which readers read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace.errors import BugError, HeadraceError, LockTimeout, RetryError
from headrace.log.file.commit_draft import CommitDraft
from headrace.log.file.journal import COMMIT, encode_record
from headrace.log.file.store import MAX_CLOCK_ERROR_US, Store

if TYPE_CHECKING:
    from headrace.log.file.checkpoint import Replica
    from headrace.log.file.commit_draft import Adoption
    from headrace.log.file.disk import Buffer, DiskFile


logger = logging.getLogger("headrace.log")
T = TypeVar("T")
INLINE_BYTES = 1 << 20
"""Up to this size a commit's rows also go into the journal, so that their segments need no sync."""
MAX_GROUP_REQUESTS = 1024
_MAX_GROUP_WAIT_S = 0.005
_CLOCK_ERROR_INTERVAL_S = 60.0


class CommitRequest(Generic[T]):
    """One thread's request: `decide` fills a draft and returns the answer."""

    def __init__(self, decide: Callable[[CommitDraft], T], size: int) -> None:
        self.decide = decide
        self.size = size
        self.answer: T | None = None
        self.error: BaseException | None = None
        self.is_finished = False
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
    """Commits the requests of all threads of this process, in groups.

    The first thread to submit leads: it waits briefly for others, commits the queued requests, and
    then wakes the first of those that came meanwhile, which leads next.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.after_commit: Callable[[], None] = lambda: None
        self.records_since_checkpoint = 0
        self.bytes_since_checkpoint = 0
        self._guard = threading.Lock()
        self._queue: deque[CommitRequest[object]] = deque()
        self._has_leader = False
        self._successor: CommitRequest[object] | None = None
        self._expected_requests = 1  # how many usually come at the same time
        self._sync_s = 0.0  # moving average
        self._arrived = threading.Semaphore(0)
        self._sync_error: BaseException | None = None
        self._next_clock_error_s = 0.0

    def submit(self, decide: Callable[[CommitDraft], T], *, size: int = 0) -> T:
        """Commit what `decide` drafts.

        Args:
            decide: Called once, under the log's lock, with a draft of the newest state. It must
                refuse (raise) before its first operation or not at all.
            size: About how many bytes of rows it appends.

        Returns:
            What `decide` returned, once the commit is durable.
        """
        request: CommitRequest[T] = CommitRequest(decide, size)
        with self._guard:
            self._queue.append(request)  # type: ignore[arg-type]
            is_leader = not self._has_leader
            self._has_leader = True
        if not is_leader:
            self._arrived.release()
            try:
                request.wait()
            except BaseException:  # Ctrl-C: leave the queue, and pass on the lead if it was ours
                with self._guard:
                    if request in self._queue:
                        self._queue.remove(request)  # type: ignore[arg-type]
                    if self._successor is request:
                        self._promote()
                raise
        if not request.is_finished:
            self._lead()
        return request.result()

    def _promote(self) -> None:
        """Make the first request in the queue the leader. Requires the guard."""
        self._successor = self._queue[0] if self._queue else None
        self._has_leader = self._successor is not None
        if self._successor is not None:
            self._successor.wake()

    def _lead(self) -> None:
        """Commit everything that is queued, then pass the lead on, whatever happens."""
        group: list[CommitRequest[object]] = []
        try:
            self._await_group()
            self._dequeue(group, MAX_GROUP_REQUESTS)
            self._commit(group)
        except BaseException as error:  # every waiting thread must get it
            self._dequeue(group, 1 - len(group))  # our own request, if Ctrl-C came before it
            group[0].error = group[0].error or error
            for request in group[1:]:
                request.error = request.error or (
                    error if isinstance(error, Exception) else _outcome_unknown(self.store, error)
                )
        finally:
            with self._guard:
                self._expected_requests = max(
                    1,
                    len(group) + len(self._queue),
                    self._expected_requests - 1 if len(group) < self._expected_requests else 0,
                )
                while self._arrived.acquire(blocking=False):
                    pass  # whoever arrived is in the queue
                for request in group:
                    request.is_finished = True
                self._promote()
            for request in group[1:]:  # the first one is our own
                request.wake()

    def _dequeue(self, group: list[CommitRequest[object]], limit: int) -> None:
        with self._guard:
            group += [self._queue.popleft() for _ in range(min(len(self._queue), limit))]

    def _await_group(self) -> None:
        """Wait briefly for the requests that usually come together: cheaper than a second sync."""
        deadline = time.perf_counter() + min(self._sync_s / 2, _MAX_GROUP_WAIT_S)
        while len(self._queue) < self._expected_requests:
            timeout_s = deadline - time.perf_counter()
            if timeout_s <= 0 or not self._arrived.acquire(timeout=timeout_s):
                return

    # The commit

    def _commit(self, group: list[CommitRequest[object]]) -> None:
        """Commit a group of requests:

        1. under the log's lock: decide what each request does
        2. write rows into segments; sync those whose rows are not in the journal too
        3. write the journal's records, all at once; give the lock back
        4. sync the journal: this is the commit point (before the lock is given back, if staged
           files must then be moved)
        5. publish how far the journal is durable
        """
        if self._sync_error is not None:
            raise RetryError(
                f"The log in {self.store.root} cannot be written any more by this process: a sync"
                f" failed ({self._sync_error}).",
                fix=(
                    "check the disk, then open the log again; whether the last appends are stored"
                    " will be seen then."
                ),
            ) from self._sync_error
        with self.store.locked() as newest:
            before = newest.lsn
            try:
                drafts = self._decide(group, newest)  # 1
                self._check_lock()
                self._write_rows(drafts)  # 2
                self._check_lock()
                end = self._write_journal(drafts, newest)  # 3
            except BaseException:
                self._undo(newest, before)
                raise
            journal = newest.journal.file_at(newest.base)
            adoptions = [adoption for draft in drafts for adoption in draft.adoptions]
            if adoptions:
                self._sync(journal)  # 4
                self._adopt(adoptions)
            self.records_since_checkpoint = newest.records_since_checkpoint
            self.bytes_since_checkpoint = newest.lsn - newest.base
        # A group without records may still rest on what another process has not synced yet.
        mark = None if end > before else self.store.marker.read()
        if mark is None or mark.lsn < end:
            if not adoptions:
                self._sync(journal)  # 4
            try:
                self.store.marker.publish(end, synced=self.store.durable)  # 5
            except LockTimeout as error:  # it is stored, and the next commit publishes it
                raise _outcome_unknown(self.store, error) from error
            self.after_commit()

    def _check_lock(self) -> None:
        """Raise RetryError if somebody has removed the lock's file: another process may have
        written the journal meanwhile, so we must not.
        """
        if not self.store.lock_file().is_at_path():
            raise RetryError(
                f"{self.store.lock_file().path} was removed while it was locked; nothing was"
                " stored.",
                fix="leave the files of a log alone, and try again.",
            )

    def _decide(self, group: list[CommitRequest[object]], newest: Replica) -> list[CommitDraft]:
        """The drafts of all requests that change something."""
        drafts = []
        time_us = self._append_time_us(newest.state.time_us)
        for request in group:
            draft = CommitDraft(newest.state, time_us, inline=request.size <= INLINE_BYTES)
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

    def _append_time_us(self, last_us: int) -> int:
        """The time of a commit. It does not go back by what clocks usually do; but one that was
        set back is followed, or nothing would expire until it has caught up.
        """
        time_us = self.store.clock.now_us()
        if last_us <= time_us + MAX_CLOCK_ERROR_US:
            return max(time_us, last_us)
        now_s = time.monotonic()
        level = logging.ERROR if now_s >= self._next_clock_error_s else logging.DEBUG
        self._next_clock_error_s = now_s + _CLOCK_ERROR_INTERVAL_S
        logger.log(
            level,
            "The machine's clock was set back, or was wrong before: the last commit to %s was"
            " %.0f s from now. Append times go back by that.",
            self.store.root,
            (last_us - time_us) / 1e6,
        )
        return time_us

    def _write_rows(self, drafts: list[CommitDraft]) -> None:
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

    def _write_journal(self, drafts: list[CommitDraft], newest: Replica) -> int:
        """Write one record per draft. Returns the journal's new end."""
        if not drafts:
            return newest.lsn
        mark = self.store.marker.read()
        durable_lsn = mark.lsn if mark and self.store.durable else 0
        buffers: list[Buffer] = []
        lsn = newest.lsn
        for draft in drafts:
            blob: list[Buffer] = []
            if draft.inline:
                blob = [buffer for write in draft.writes for buffer in write.buffers]
            record = encode_record(
                lsn,
                COMMIT,
                draft.commit,
                durable_lsn,
                {"t": draft.time_us, "ops": draft.operations},
                blob,
            )
            buffers += record
            lsn += sum(map(len, record))
        journal = newest.journal.file_at(newest.base)
        newest.lsn = newest.base + journal.write(buffers, newest.lsn - newest.base)
        newest.records_since_checkpoint += len(drafts)
        return newest.lsn

    def _adopt(self, adoptions: list[Adoption]) -> None:
        """Move staged files to their partitions, after the commit point: a move that fails here is
        repeated by the next process that reads the journal.
        """
        try:
            for adoption in adoptions:
                self.store.adopt(adoption)
        except BaseException as error:
            self.store.forget_newest()
            if isinstance(error, Exception):
                raise _outcome_unknown(self.store, error) from error
            raise

    def _undo(self, newest: Replica, before: int) -> None:
        """Remove a failed group from the journal and from this process's newest state. Without the
        lock, what is behind the journal's end may be another process's.
        """
        try:
            journal = newest.journal.file_at(newest.base)
            is_ours = self.store.lock_file().is_at_path()
            if is_ours and journal.size() > before - newest.base:
                journal.truncate(before - newest.base)
                journal.sync()  # or it could come back after power loss
        finally:
            self.store.forget_newest()

    def _sync(self, journal: DiskFile) -> None:
        if not self.store.durable:
            return
        started = time.perf_counter()
        self.sync(journal)
        self._sync_s = 0.8 * self._sync_s + 0.2 * (time.perf_counter() - started)

    def sync(self, file: DiskFile) -> None:
        """Sync a file. After a failed sync this process writes no more.

        The operating system reports a failed sync once and then considers the pages written: a
        second sync would succeed although the bytes are not on disk.
        """
        try:
            file.sync()
        except (OSError, HeadraceError) as error:
            self._sync_error = error
            raise _outcome_unknown(self.store, error) from error


def _outcome_unknown(store: Store, error: BaseException) -> RetryError:
    return RetryError(
        f"Whether this is stored in {store.root} is not known: {error}",
        fix=(
            "check the disk, open the log again and look; a producer with an id can simply"
            " repeat it."
        ),
    )
