"""What all parts of the log's contract share: an open log, fresh names, and what differs between
backends by declaration.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa
import pytest

import headrace as hr
from headrace.columnar.columns import SYSTEM_FIELDS

ORDERS = "order_id BIGINT, customer_id BIGINT, amount DOUBLE"
SYSTEM_COLUMNS = [field.name for field in SYSTEM_FIELDS]

MakeName = Callable[[str], str]


class ContractBase:
    """A backend's test class gives an `address` fixture and says where it differs."""

    markers_take_offsets: ClassVar[bool] = False
    """A committed transaction takes one more offset in each partition it wrote to."""
    has_global_order: ClassVar[bool] = True
    """Appends and transactions are numbered in one order over all topics."""
    keeps_deleted_values: ClassVar[bool] = True
    """A row appended as a deletion keeps the columns that are not its key."""
    smallest_segment_bytes: ClassVar[int] = 1
    shortest_visibility: ClassVar[str] = "300 milliseconds"
    """Of a queue's message; `visibility_seconds` is the same as a number."""
    visibility_seconds: ClassVar[float] = 0.3
    can_renew: ClassVar[bool] = True
    receipts_work_anywhere: ClassVar[bool] = True
    """A message can be settled by its receipt in another process than the one that received it."""
    delays_beyond_visibility: ClassVar[bool] = True
    counts_queue_lag: ClassVar[bool] = True
    shows_queues: ClassVar[bool] = True
    """A queue's messages can be looked at and purged, and its group can be deleted."""

    @pytest.fixture
    def log(self, address: str) -> Iterator[hr.Log]:
        with hr.open_log(address) as opened:
            yield opened

    @pytest.fixture
    def other(self, address: str) -> Iterator[hr.Log]:
        """Open the log again, as another process would."""
        with hr.open_log(address) as opened:
            yield opened

    def forget_old_rows(self, log: hr.Log, topic: str) -> None:
        """Let retention remove some, but not all, of the rows of a topic with one partition."""
        raise NotImplementedError

    @pytest.fixture
    def name(self) -> MakeName:
        """Names that no other test uses: a broker outlives a test."""
        suffix = uuid.uuid4().hex[:8]
        return lambda stem: f"{stem}-{suffix}"

    @pytest.fixture
    def orders(self, log: hr.Log, name: MakeName) -> str:
        """A keyed topic with four partitions and no rows."""
        return log.create_topic(name("orders"), ORDERS, key="customer_id", partitions=4).name

    @pytest.fixture
    def events(self, log: hr.Log, name: MakeName) -> str:
        """A topic with one partition, no key and no rows."""
        return log.create_topic(name("events"), "n BIGINT, text STRING").name


def order(number: int, customer: int = 1, amount: float | None = 1.5) -> dict[str, Any]:
    return {"order_id": number, "customer_id": customer, "amount": amount}


def event(number: int, text: str | None = "x") -> dict[str, Any]:
    return {"n": number, "text": text}


def append(log: hr.Log, topic: str, rows: Any, **options: Any) -> hr.AppendResult:
    with log.producer(topic) as producer:
        return producer.append(rows, **options)


def rows_of(log: hr.Log, topic: str, **options: Any) -> list[dict[str, Any]]:
    """All rows, without the system's columns."""
    return user_rows(log.read(topic, **options))


def user_rows(batches: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        rows += batch.drop_columns(
            [name for name in SYSTEM_COLUMNS if name in batch.schema.names]
        ).to_pylist()
    return rows


def numbers(batches: Sequence[pa.RecordBatch], column: str = "n") -> list[int]:
    return [value for batch in batches for value in batch.column(column).to_pylist()]


def drain(consumer: hr.Consumer, count: int, *, column: str = "n", tries: int = 60) -> list[int]:
    """Poll until so many rows have come."""
    found: list[int] = []
    for _ in range(tries):
        if len(found) >= count:
            break
        found += numbers(consumer.poll(timeout="500 milliseconds"), column)
    assert len(found) >= count, f"only {len(found)} of {count} rows came: {found[:20]}"
    return found
