"""What every sink's target is: something that takes a batch and the place in the topic in one atomic commit, refuses an older owner, and can be read back.

The rules (who may write, which batch is due, that refused rows are told of before the commit) are here, once. A kind of target says how it opens such a commit
(`exclusive`), and what is done inside: `read_applied`, `write_applied`, `merge`, `clear`.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event

import pyarrow as pa

from headrace.errors import BadRows, TargetRefuses
from headrace.log.api import Closing, Log
from headrace.log.json_rows import encoded
from headrace.sinks.applied import Applied, check_owner, is_due, taken_over
from headrace.sinks.batch import Batch
from headrace.sinks.declared import Sink
from headrace.sinks.shape import Shape

MOST_REFUSED = 1000
PIECE_ROWS = 10_000
"""How many rows of a target are held at a time, when it is read back."""


class RowsRefused(Exception):
    """The target takes these rows neither now nor later: a constraint or a type is against it. The text is the target's own."""


@dataclass(frozen=True)
class Refusal:
    """A row that a target refuses: its place in the topic, and why."""

    partition: int
    offset: int
    reason: str


OnRefused = Callable[[Sequence[Refusal]], None]


def new_owner() -> int:
    """A number that no other process has chosen."""
    return secrets.randbits(62)


class Target(Closing):
    """One target, opened by one process. `prepare`, then `begin`, then `apply` again and again; or `prepare` and `contents`, to compare."""

    log: Log
    """Where the topic is, for a target that can keep no place of its own."""

    def __init__(self, sink: Sink, shape: Shape) -> None:
        self.sink, self.shape = sink, shape
        self.table = sink.table or shape.topic
        self.owner = -1
        self.stopped = Event()
        """Set when whoever runs the sink wants to end: what takes long looks at it."""

    # What each kind says

    @abstractmethod
    def prepare(self) -> None:
        """Make what is missing, if the sink may; or say what is wrong with what is there."""

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """Around one atomic change: what is done inside happens when it is left, if nobody else has changed the target meanwhile, or never. An exception undoes it."""

    @abstractmethod
    def read_applied(self) -> Applied | None: ...

    @abstractmethod
    def write_applied(self, applied: Applied) -> None: ...

    @abstractmethod
    def merge(self, batch: Batch) -> list[Refusal]:
        """Inside a commit: deletes, then upserts. Returns what could not be done."""

    @abstractmethod
    def clear(self) -> None:
        """Inside a commit: remove all rows."""

    @abstractmethod
    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        """Up to where rows were applied, and all rows, in the shape's columns, piece by piece; both as of one moment, which lasts until the last piece."""

    @abstractmethod
    def lookup(self, keys: pa.Table) -> pa.Table:
        """The rows of some keys."""

    # The same for all

    def begin(self, owner: int, *, resume: bool = False, start_over: bool = False) -> Applied:
        """Take over from whoever wrote here before; with `resume`, only if that was this owner. Returns where to go on."""
        with self.exclusive():
            known = self.read_applied()
            mine = taken_over(known, self.shape, owner, resume=resume, start_over=start_over)
            if start_over and not resume:
                self.clear()
            if mine != known:
                self.write_applied(mine)
        self.owner = owner
        return mine

    def apply(self, batch: Batch, on_refused: OnRefused) -> bool:
        """One batch, atomically with its place. Returns False if the target had it already. `on_refused` hears of refused rows before anything is committed."""
        with self.exclusive():
            known = self.read_applied()
            check_owner(known, self.owner)
            assert known is not None
            if not is_due(known, batch):
                return False
            refused = [*keyless(batch), *self.merge(batch)]
            stop = self.reached(batch)
            if refused := [each for each in refused if each.offset < stop.get(each.partition, 0)]:
                on_refused(refused)
            self.write_applied(known.advanced(stop))
        return True

    def reached(self, batch: Batch) -> Mapping[int, int]:
        """How far the merge of a batch came: to its end, unless a target has to stop in the middle."""
        return batch.stop


def keyless(batch: Batch) -> list[Refusal]:
    return refusals(batch.keyless, "its key is null")


def refusals(places: pa.Table, reason: str) -> list[Refusal]:
    return [Refusal(row["_partition"], row["_offset"], reason) for row in places.select(["_partition", "_offset"]).to_pylist()]


def in_pieces(rows: pa.Table, places: pa.Table, attempt: Callable[[pa.Table], None], refused: list[Refusal]) -> None:
    """Do something to rows; if it is refused, to each half, and so on, until the culprits stand alone. `attempt` leaves nothing behind when it is refused."""
    if not rows.num_rows:
        return
    try:
        attempt(rows)
    except RowsRefused as error:
        if rows.num_rows == 1:
            refused += refusals(places, str(error))
            _check_few(refused)
            return
        half = rows.num_rows // 2
        for start, length in ((0, half), (half, rows.num_rows - half)):
            in_pieces(rows.slice(start, length), places.slice(start, length), attempt, refused)


def upserted(batch: Batch, attempt: Callable[[pa.Table], None], *, rows_at_once: int) -> list[Refusal]:
    """A batch's upserts, some at a time; returns those that were refused."""
    refused: list[Refusal] = []
    for start in range(0, batch.upserts.num_rows, rows_at_once):
        in_pieces(batch.upserts.slice(start, rows_at_once), batch.upsert_places.slice(start, rows_at_once), attempt, refused)
    return refused


def json_of(rows: pa.RecordBatch) -> list[bytes]:
    """Each row as a JSON object, as the log writes it; what JSON cannot carry is refused."""
    try:
        texts: list[bytes] = encoded(rows).to_pylist()
    except BadRows as error:
        raise RowsRefused(error.message) from error
    return texts


def _check_few(refused: Sequence[Refusal]) -> None:
    if len(refused) > MOST_REFUSED:
        raise TargetRefuses(
            f"The target refuses more than {MOST_REFUSED:,} rows of one batch, such as offset {refused[0].offset} of partition {refused[0].partition}: {refused[0].reason}",
            fix="change the target's table or constraints so that it takes them; nothing of this batch was applied, and it goes on there.",
        )
