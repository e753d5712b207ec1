"""What every sink's target is: something that takes a batch and the place in the topic in one
atomic commit, refuses an older owner, and can be read back.

The rules (who may write, which batch is due, that refused rows are told of before the commit) are
here, once. A kind of target says how it opens such a commit (`exclusive`), and what is done inside:
`read_applied`, `write_applied`, `merge`, `clear`.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    HIDDEN_FIELDS,
    MARKS,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    UPDATE_BEFORE,
)
from headrace.errors import (
    BadRows,
    InputError,
    NewerFormat,
    SinkFenced,
    TargetMismatch,
    TargetRefuses,
    TargetUnavailable,
    UnknownColumn,
    nearest,
)
from headrace.log.api import Closing, Log
from headrace.log.topic_config import check_name
from headrace.log.values import TopicInfo
from headrace.operators.changelog import with_unchanged
from headrace.types.json_codec import encoded

# What a sink's target holds: the columns and the key that follow from a topic and how it is
# followed.


_HIDDEN = {each.name for each in HIDDEN_FIELDS}


MERGE, APPEND = "merge", "append"
DEFAULT_BATCH_ROWS = 50_000


@dataclass(frozen=True)
class SinkSpec:
    """One place in another system that is kept equal to a topic of the log.

    `table` is what it is called there (the topic's name, if nothing is said). `mode` is "merge"
    (one row a key, the newest; the default for a table's topic and for one with a key given here)
    or "append" (every row of the topic once, with `_partition` and `_offset`). `create` says
    whether what is missing is made.
    """

    kind: str
    opener: Callable[[SinkSpec, Shape], Target] = field(repr=False, compare=False)
    table: str | None = None
    name: str | None = None
    mode: str | None = None
    key: tuple[str, ...] = ()
    create: bool = True
    batch_rows: int = DEFAULT_BATCH_ROWS
    keeps_marks: bool = False
    """Whether `_marks` goes along also when rows are merged: the target cannot be asked for what a
    change left as it was.
    """
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in {None, MERGE, APPEND}:
            raise InputError(
                f"A sink has no mode {self.mode!r}: {nearest(str(self.mode), [MERGE, APPEND])}"
            )
        if self.name is not None:
            check_name(self.name, what="sink name")
        if self.batch_rows < 1:
            raise InputError("batch_rows must be at least 1.")

    def name_for(self, topic: str) -> str:
        """Under which its dead letters stand: those of `orders.postgres` in the topic
        `orders.postgres.dead`.
        """
        return self.name or f"{topic}.{self.kind}"

    def open(self, shape: Shape, log: Log) -> Target:
        """The target, ready to be prepared."""
        target = self.opener(self, shape)
        target.log = log
        return target


@dataclass(frozen=True)
class Shape:
    """`schema` are the target's columns, `key` those by which a row is known there. In append mode
    that is the row's place in the topic.
    """

    topic: str
    topic_id: str
    schema: pa.Schema
    key: tuple[str, ...]
    mode: str
    source: pa.Schema
    """The topic's own columns: when they are others, the target is prepared again."""

    @property
    def is_merge(self) -> bool:
        return self.mode == MERGE

    @property
    def values(self) -> list[str]:
        """The columns that are not part of the key."""
        return [name for name in self.schema.names if name not in self.key]


def shape_of(sink: SinkSpec, info: TopicInfo) -> Shape:
    mode = sink.mode or (MERGE if info.is_table or sink.key else APPEND)
    hidden = _HIDDEN - {MARKS} if mode == APPEND or sink.keeps_marks else _HIDDEN
    fields = [
        pa.field(each.name, each.type)
        for each in info.arrow_schema
        if each.name != CHANGE_TYPE and not (info.is_table and each.name in hidden)
    ]
    if mode == APPEND:
        places = [pa.field(PARTITION_COLUMN, pa.int32()), pa.field(OFFSET_COLUMN, pa.int64())]
        changes = [pa.field(CHANGE_TYPE, pa.string())] if info.is_table else []
        return Shape(
            info.name,
            info.id,
            pa.schema([*fields, *changes, *places]),
            (PARTITION_COLUMN, OFFSET_COLUMN),
            mode,
            info.arrow_schema,
        )
    return Shape(
        info.name, info.id, pa.schema(fields), _key(sink, info, fields), mode, info.arrow_schema
    )


def _key(sink: SinkSpec, info: TopicInfo, fields: list[pa.Field]) -> tuple[str, ...]:
    if info.is_table and sink.key and sink.key != info.key:
        raise InputError(
            f"The table {info.name!r} has the key {', '.join(info.key)}, not"
            f" {', '.join(sink.key)}.",
            fix="leave out key=…: a table is merged by its own.",
        )
    key = sink.key or info.key
    if not key:
        raise InputError(
            f"The topic {info.name!r} has no key to merge by.",
            fix="give key=… (--key …), or use mode='append'.",
        )
    names = [each.name for each in fields]
    for name in key:
        if name not in names:
            raise UnknownColumn(name, names, where=f"The topic {info.name!r}")
    return key


# A batch on its way to a target: of each key the last change, as Arrow tables, and the places of
# the topic it stands for.


Lookup = Callable[[pa.Table], pa.Table]
"""Keys -> the rows that the target has for them."""
_PLACES = [PARTITION_COLUMN, OFFSET_COLUMN]


@dataclass(frozen=True)
class Batch:
    """`upserts` has the target's columns, `deletes` its key's; no key is in both or twice.
    `upsert_places` and `delete_places` say where each stands in the topic.

    `start` and `stop` are offsets by partition: what the batch begins behind, and what is applied
    with it.
    """

    upserts: pa.Table
    deletes: pa.Table
    upsert_places: pa.Table
    delete_places: pa.Table
    keyless: pa.Table
    """Rows whose key is null, with their places: nothing can be merged by it."""
    start: Mapping[int, int]
    stop: Mapping[int, int]
    fresh: frozenset[int] = frozenset()
    """Partitions of which the target is to know nothing yet."""

    @property
    def rows(self) -> int:
        return int(self.upserts.num_rows + self.deletes.num_rows)


def batch_of(
    raw: Sequence[pa.RecordBatch],
    shape: Shape,
    start: Mapping[int, int],
    stop: Mapping[int, int],
    lookup: Lookup,
    *,
    fresh: frozenset[int] = frozenset(),
) -> Batch:
    """From rows as the log gives them."""
    rows = pa.Table.from_batches(raw) if raw else _nothing(shape)
    if not shape.is_merge:
        places = rows.select(_PLACES)
        nothing = rows.slice(0, 0)
        return Batch(
            plain(rows, shape),
            nothing.select(list(shape.key)),
            places,
            nothing.select(_PLACES),
            nothing,
            start,
            stop,
            fresh,
        )
    rows, keyless = _by_having_key(rows, shape)
    rows = newest(rows, shape, lookup)
    gone = (
        pc.equal(rows[CHANGE_TYPE], DELETE)
        if CHANGE_TYPE in rows.column_names
        else pa.chunked_array([pa.array([False] * rows.num_rows, pa.bool_())])
    )
    alive, dead = rows.filter(pc.invert(gone)), rows.filter(gone)
    return Batch(
        plain(alive, shape),
        dead.select(list(shape.key)),
        alive.select(_PLACES),
        dead.select(_PLACES),
        keyless,
        start,
        stop,
        fresh,
    )


def newest(rows: pa.Table, shape: Shape, lookup: Lookup) -> pa.Table:
    """The last change of each key, in the topic's order, whole: what a change left as it was is
    filled in. A key stays in one partition, so the order given is its own.
    """
    if CHANGE_TYPE in rows.column_names:
        rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_BEFORE))
    if MARKS in rows.column_names and rows[MARKS].null_count < rows.num_rows:
        rows = with_unchanged(rows, list(shape.key), lookup)
    numbered = rows.select(list(shape.key)).append_column("__n", pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(list(shape.key)).aggregate([("__n", "max")])["__n_max"].to_numpy()
    return rows if len(last) == rows.num_rows else rows.take(pa.array(np.sort(last)))


def plain(rows: pa.Table, shape: Shape) -> pa.Table:
    """The target's columns, of exactly its types."""
    return rows.select(shape.schema.names).cast(shape.schema)


def _by_having_key(rows: pa.Table, shape: Shape) -> tuple[pa.Table, pa.Table]:
    if all(rows[name].null_count == 0 for name in shape.key):
        return rows, rows.slice(0, 0)
    missing = pc.is_null(rows[shape.key[0]])
    for name in shape.key[1:]:
        missing = pc.or_(missing, pc.is_null(rows[name]))
    return rows.filter(pc.invert(missing)), rows.filter(missing)


def _nothing(shape: Shape) -> pa.Table:
    fields = [
        *shape.source,
        pa.field(PARTITION_COLUMN, pa.int32()),
        pa.field(OFFSET_COLUMN, pa.int64()),
    ]
    return pa.schema(fields).empty_table()


# What a target knows of itself: who writes to it, and up to which place of the topic it was
# written. It is stored there, in the same commit as the rows.


VERSION = 1


@dataclass(frozen=True)
class Applied:
    """`owner` is a number that the writing process chose for itself, `epoch` counts the owners;
    `positions` are the next offsets of the topic's partitions.
    """

    topic: str
    topic_id: str
    epoch: int
    owner: int
    positions: Mapping[int, int] = field(default_factory=dict)
    at_us: int = 0

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Applied:
        stored = json.loads(text)
        if stored.pop("version") > VERSION:
            raise NewerFormat(
                "The sink's target was written by a newer Headrace.", fix="upgrade Headrace."
            )
        stored["positions"] = {
            int(partition): offset for partition, offset in stored["positions"].items()
        }
        return cls(**stored)

    def advanced(self, positions: Mapping[int, int]) -> Applied:
        return replace(
            self, positions={**self.positions, **positions}, at_us=time.time_ns() // 1000
        )


def taken_over(
    known: Applied | None, shape: Shape, owner: int, *, resume: bool, start_over: bool
) -> Applied:
    """What the target says from now on. An owner that only goes on after a fault must still be the
    newest one.
    """
    if known is None or (start_over and not resume):
        return Applied(
            shape.topic,
            shape.topic_id,
            1 if known is None else known.epoch + 1,
            owner,
            at_us=time.time_ns() // 1000,
        )
    if resume:
        check_owner(known, owner)
        return known
    if known.topic != shape.topic or (
        known.topic_id and shape.topic_id and known.topic_id != shape.topic_id
    ):
        same = known.topic == shape.topic
        raise TargetMismatch(
            "The target is filled from"
            f" {'an earlier topic ' + repr(known.topic) + ', which was deleted and made again' if same else 'the topic ' + repr(known.topic)}.",
            fix=(
                "choose another target with table=… (--table …); or, to empty this one and fill it"
                " anew, --start-over."
            ),
        )
    return replace(known, epoch=known.epoch + 1, owner=owner)


def check_owner(known: Applied | None, owner: int) -> None:
    if known is None:
        raise TargetUnavailable(
            "The target has forgotten what it had: it was emptied, or restored.",
            fix="nothing: it is filled again from the beginning.",
        )
    if known.owner != owner:
        raise SinkFenced(
            f"Another process writes to this target (it has epoch {known.epoch}).",
            fix=(
                "nothing, if that was meant: it goes on where this one stopped. Start one sync of a"
                " target only."
            ),
        )


def is_due(known: Applied, batch: Batch) -> bool:
    """Whether a batch is the next one. What the target has already is not applied again."""
    expected = {
        partition: None if partition in batch.fresh else start
        for partition, start in batch.start.items()
    }
    at = {partition: known.positions.get(partition) for partition in batch.stop}
    if at == expected:
        return True
    if all((at[partition] or 0) >= stop for partition, stop in batch.stop.items()):
        return False
    raise TargetUnavailable(
        "The target is at another place of the topic than it was: it lost what it had, or was"
        " restored.",
        fix="nothing: it is read again from there.",
    )


MAX_REFUSED = 1000
PIECE_ROWS = 10_000
"""How many rows of a target are held at a time, when it is read back."""


class RowsRefused(Exception):
    """The target takes these rows neither now nor later: a constraint or a type is against it. The
    text is the target's own.
    """


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
    """One target, opened by one process. `prepare`, then `begin`, then `apply` again and again; or
    `prepare` and `contents`, to compare.
    """

    log: Log
    """Where the topic is, for a target that can keep no place of its own."""

    def __init__(self, sink: SinkSpec, shape: Shape) -> None:
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
        """Around one atomic change: what is done inside happens when it is left, if nobody else has
        changed the target meanwhile, or never. An exception undoes it.
        """

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
        """Up to where rows were applied, and all rows, in the shape's columns, piece by piece; both
        as of one moment, which lasts until the last piece.
        """

    @abstractmethod
    def lookup(self, keys: pa.Table) -> pa.Table:
        """The rows of some keys."""

    # The same for all

    def begin(self, owner: int, *, resume: bool = False, start_over: bool = False) -> Applied:
        """Take over from whoever wrote here before; with `resume`, only if that was this owner.
        Returns where to go on.
        """
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
        """One batch, atomically with its place. Returns False if the target had it already.
        `on_refused` hears of refused rows before anything is committed.
        """
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
        """How far the merge of a batch came: to its end, unless a target has to stop in the
        middle.
        """
        return batch.stop


def keyless(batch: Batch) -> list[Refusal]:
    return refusals(batch.keyless, "its key is null")


def refusals(places: pa.Table, reason: str) -> list[Refusal]:
    return [
        Refusal(row["_partition"], row["_offset"], reason)
        for row in places.select(["_partition", "_offset"]).to_pylist()
    ]


def in_pieces(
    rows: pa.Table, places: pa.Table, attempt: Callable[[pa.Table], None], refused: list[Refusal]
) -> None:
    """Do something to rows; if it is refused, to each half, and so on, until the culprits stand
    alone. `attempt` leaves nothing behind when it is refused.
    """
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


def upserted(
    batch: Batch, attempt: Callable[[pa.Table], None], *, rows_at_once: int
) -> list[Refusal]:
    """A batch's upserts, some at a time; returns those that were refused."""
    refused: list[Refusal] = []
    for start in range(0, batch.upserts.num_rows, rows_at_once):
        in_pieces(
            batch.upserts.slice(start, rows_at_once),
            batch.upsert_places.slice(start, rows_at_once),
            attempt,
            refused,
        )
    return refused


def json_of(rows: pa.RecordBatch) -> list[bytes]:
    """Each row as a JSON object, as the log writes it; what JSON cannot carry is refused."""
    try:
        texts: list[bytes] = encoded(rows).to_pylist()
    except BadRows as error:
        raise RowsRefused(error.message) from error
    return texts


def _check_few(refused: Sequence[Refusal]) -> None:
    if len(refused) > MAX_REFUSED:
        raise TargetRefuses(
            f"The target refuses more than {MAX_REFUSED:,} rows of one batch, such as offset"
            f" {refused[0].offset} of partition {refused[0].partition}: {refused[0].reason}",
            fix=(
                "change the target's table or constraints so that it takes them; nothing of this"
                " batch was applied, and it goes on there."
            ),
        )
