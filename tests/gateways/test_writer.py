"""What the writer does when the log does not say whether it stored an append."""

from typing import Any

import pytest

import headrace as hr
from headrace.errors import RetryError
from headrace.gateways.base import now_us
from headrace.gateways.inbox import Fate, JsonLines, Submission
from headrace.gateways.writer import GatewayWriter
from tests.gateways.conftest import order_ids


def order(number: int) -> Submission:
    return Submission("orders", JsonLines([b'{"order_id": %d}' % number]), 1, 20, now_us())


class UncertainProducer:
    """Stores an append and fails all the same, as often as it is told."""

    def __init__(self, producer: hr.Producer, failures: int) -> None:
        self._producer, self._failures = producer, failures
        self.last_sequence = producer.last_sequence

    def append(self, rows: Any, **settings: Any) -> Any:
        result = self._producer.append(rows, **settings)
        if self._failures:
            self._failures -= 1
            raise RetryError("whether it was stored is not known")
        self.last_sequence = self._producer.last_sequence
        return result


def uncertain(log: hr.Log, failures: int = 1) -> GatewayWriter:
    writer = GatewayWriter(log, "door")
    writer.write([order(0)])
    topic: Any = writer._topics["orders"]
    topic._producer = UncertainProducer(topic._producer, failures)
    return writer


def test_rows_after_an_append_of_unknown_outcome_do_not_pass_for_its_rows(log: hr.Log) -> None:
    """The next rows were acknowledged and not stored: they had the sequence number of an append
    that had been stored although it failed.
    """
    writer = uncertain(log)
    with pytest.raises(RetryError):
        writer.write([order(1)])
    assert writer.write([order(2)])[0].fate is Fate.stored
    assert writer.write([order(3)])[0].fate is Fate.stored
    assert order_ids(log) == [0, 1, 2, 3]


def test_an_append_of_unknown_outcome_that_is_tried_again_is_stored_once(log: hr.Log) -> None:
    writer = uncertain(log, failures=3)
    orders = [order(1), order(2)]
    for _ in range(3):
        with pytest.raises(RetryError):
            writer.write(orders)
    assert [result.fate for result in writer.write(orders)] == [Fate.stored] * 2
    assert order_ids(log) == [0, 1, 2]
