"""Senders at five times the pace of the log, which is measured first: memory stays bounded, each
policy does what it is named for, and every row sent is stored, dropped or refused. Also bodies of
any kind.

All policies of a kind are flooded at the same time, each with a topic, a gateway and a process that
sends to it.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.gateways.base import GatewayServer
from tests.gateways.conftest import ORDERS, adds_up
from tests.gateways.floods import Flood, flood
from tests.gateways.paced_log import PacedLog, measured_pace
from tests.gateways.senders import JSON, LINES, post
from tests.servers.rabbitmq_server import RabbitmqServer
from tests.short_forms import examples
from tests.waits import wait_until

POLICIES = ("block", "buffer", "drop newest", "drop oldest")
LOG_ROWS_A_SECOND, TIMES = 500, 5
MAX_ROWS, MAX_BYTES = 300, 1 << 20
MORE_MEMORY_BYTES = 64 << 20


class Overload:
    """One policy of one kind of gateway: its log, slow as a bad disk, and its sender, five times as
    fast.
    """

    def __init__(
        self, kind: str, policy: str, directory: Path, stack: ExitStack, broker: str = ""
    ) -> None:
        self.kind, self.policy, self.queue = kind, policy, f"overload-{policy.replace(' ', '-')}"
        self.log: Any = PacedLog(
            stack.enter_context(hr.open_log(f"file:{directory / self.queue}")), LOG_ROWS_A_SECOND
        )
        self.log.create_topic("orders", ORDERS)
        self.log.create_topic("tried", ORDERS)
        rows = pa.RecordBatch.from_pylist(
            [{"order_id": 1, "region": "r" * 200}] * 25, schema=self.log.topic("tried").arrow_schema
        )
        self.pace = measured_pace(self.log, "tried", rows)
        self.address = f"{broker} {self.queue}" if broker else ""
        bounds: dict[str, Any] = {
            "policy": policy,
            "max_rows": MAX_ROWS,
            "max_bytes": MAX_BYTES,
            "patience": "5 minutes",
        }
        self.gateway = stack.enter_context(
            self._declared(broker, bounds).open(cast("hr.Log", self.log))
        )
        self.max_waiting_rows = self.max_waiting_bytes = 0

    def _declared(self, broker: str, bounds: dict[str, Any]) -> hr.gateways.Gateway:
        if self.kind == "amqp":
            return hr.gateways.amqp("orders", url=broker, queue=self.queue, declare=True, **bounds)
        if self.kind == "zeromq":
            return hr.gateways.zeromq("orders", bind="tcp://127.0.0.1:*", **bounds)
        return (
            hr.gateways.http("orders", port=0, **bounds)
            if self.kind == "http"
            else hr.gateways.statsd("values", port=0, flush=None, **bounds)
        )

    def flood(self, seconds: float) -> None:
        self.sender = flood(
            self.kind, self.address or self.gateway.address, TIMES * self.pace, seconds
        )
        self.began_s = time.monotonic()

    def look(self) -> None:
        inbox = self.gateway.inbox
        self.max_waiting_rows, self.max_waiting_bytes = (
            max(self.max_waiting_rows, inbox.waiting_rows),
            max(self.max_waiting_bytes, inbox.waiting_bytes),
        )

    def hurry(self) -> None:
        """The flood is over: the log is let go, and takes what still waits somewhere."""
        self.in_time, self.seconds = self.gateway.status().stored, time.monotonic() - self.began_s
        self.log.hurry()

    def settle(self) -> None:
        self.sender.stop()
        wait_until(self._is_over, timeout_s=300)

    def _is_over(self) -> bool:
        status, sent = self.gateway.status(), self.sender.sent
        received = status.received + status.details.get("packets_lost_by_the_system", 0)
        is_all = (
            status.stored == sent
            if self.kind == "amqp" and self.policy == "buffer"
            else received == sent
        )
        return is_all and (status.waiting_rows, status.waiting_bytes) == (0, 0)

    def check(self) -> None:
        """1. as slow as it is said to be; 2. bounded; 3. as the policy says; 4. every row has one
        fate.
        """
        assert self.in_time <= LOG_ROWS_A_SECOND * self.seconds  # 1
        assert 0 < self.max_waiting_rows <= MAX_ROWS  # 2
        assert 0 < self.max_waiting_bytes <= MAX_BYTES
        status = self.gateway.status()
        stored = sum(self.log.end_offsets("values" if self.kind == "statsd" else "orders").values())
        if self.policy != "block":  # 3
            assert self.sender.sent > 2 * self.in_time
            assert (status.refused > 0, status.dropped > 0) == (
                self.policy == "buffer",
                self.policy != "buffer",
            )
        assert self.policy != "block" or (status.refused, status.dropped) == (0, 0)
        assert adds_up(self.gateway)  # 4
        assert (status.stored, status.repeated, status.waiting_rows, status.waiting_bytes) == (
            stored,
            0,
            0,
            0,
        )
        self._check_sent(status, self.sender)

    def _check_sent(self, status: Any, sender: Flood) -> None:
        if self.kind == "http":
            assert (sender.answers.get("200", 0), sender.answers.get("503", 0)) == (
                status.stored,
                status.dropped + status.refused,
            )
        if (
            self.kind == "amqp" and self.policy == "buffer"
        ):  # what is refused stays in the queue, and comes again
            assert sender.sent == status.stored
            return
        lost = status.details.get("packets_lost_by_the_system", 0)
        assert sender.sent == status.stored + status.dropped + status.refused + lost


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def overloaded(kind: str, directory: Path, seconds: float, broker: str = "") -> int:
    """All policies at once. Returns by how much memory grew after the first tenth of the time."""
    with ExitStack() as stack:
        floods = [Overload(kind, policy, directory, stack, broker) for policy in POLICIES]
        for each in floods:
            each.flood(seconds)
        for each in floods:
            each.sender.start()
        began_s, before = time.monotonic(), resident_bytes()
        while (passed_s := time.monotonic() - began_s) < seconds:
            for each in floods:
                each.look()
            before = resident_bytes() if passed_s < seconds / 10 else before
            time.sleep(0.02)
        grown = resident_bytes() - before
        for each in floods:
            each.hurry()
        for each in floods:
            each.settle()
        for each in floods:
            each.check()
    return grown


@pytest.mark.parametrize("kind", ["http", "statsd", "zeromq"])
def test_every_row_of_a_flood_has_one_fate(tmp_path: Path, kind: str) -> None:
    assert overloaded(kind, tmp_path, seconds=2.5) < MORE_MEMORY_BYTES


def test_every_message_of_a_flooded_queue_has_one_fate(
    tmp_path: Path, rabbitmq: RabbitmqServer
) -> None:
    assert overloaded("amqp", tmp_path, seconds=2.5, broker=rabbitmq.url) < MORE_MEMORY_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http", "statsd", "zeromq", "amqp"])
def test_a_minute_of_overload_takes_no_more_memory(
    tmp_path: Path, kind: str, rabbitmq: RabbitmqServer
) -> None:
    assert (
        overloaded(kind, tmp_path, seconds=60, broker=rabbitmq.url if kind == "amqp" else "")
        < MORE_MEMORY_BYTES
    )


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    with hr.open_log(f"file:{tmp_path_factory.mktemp('fuzzed') / 'log'}") as log:
        log.create_topic("orders", ORDERS)
        with hr.gateways.http("orders", port=0).open(log) as running:
            yield running


BODIES = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=100).map(str.encode),
    st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
        lambda v: json.dumps(v).encode()
    ),
)


@settings(max_examples=examples(60))
@given(body=BODIES, lines=st.booleans())
def test_any_body_is_answered_and_counted(fuzzed: GatewayServer, body: bytes, lines: bool) -> None:
    before = fuzzed.status()
    code, _ = post(fuzzed.address, "/topics/orders", body, LINES if lines else JSON)
    after = fuzzed.status()
    assert code in {200, 400}
    assert after.received > before.received
    assert adds_up(fuzzed)
    assert (after.refused > before.refused) == (code == 400)
