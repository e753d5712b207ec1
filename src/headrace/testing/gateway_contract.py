"""What every gateway promises, as a suite of tests. Gateways of the package pass it, and so should
one that you write:

    class TestDatagrams(GatewayContract):
        @pytest.fixture
        def gateway(self):
            return Gateway(kind="datagrams", name="datagrams", opener=DatagramServer,
                           topics=("rows",), options={"host": "127.0.0.1", "port": 0})

        def send(self, server, payload):
            send_datagram(server.address, payload)

A subclass gives the fixture `gateway`, for the topic `rows`, and `send`, which sends one message
with JSON to a server. It says whether senders get an answer (`answers_senders`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import HeadraceError, ProducerFenced, TransactionFenced
from headrace.gateways import Gateway
from headrace.gateways.base import GatewayServer
from headrace.gateways.inbox import overload_policy
from headrace.log.dead_letters import read_dead_letters

ROWS = "id BIGINT, name STRING, received_at TIMESTAMP"
PATIENCE_S = 30.0


def message(*numbers: int) -> bytes:
    """Return JSON lines with a row for each number."""
    rows = [{"id": number, "name": f"row {number}"} for number in numbers]
    return "\n".join(map(json.dumps, rows)).encode()


class GatewayContract:
    """The suite."""

    answers_senders = False
    """Whether a sender learns that its rows do not fit. Otherwise they become dead letters."""

    def send(self, server: GatewayServer, payload: bytes) -> None:
        """Send one message. What the server answers, if anything, does not matter here."""
        raise NotImplementedError

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[hr.Log]:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log:
            log.create_topic("rows", ROWS)
            yield log

    def test_messages_are_rows_with_the_time_at_which_they_came(
        self, gateway: Gateway, log: hr.Log
    ) -> None:
        before = datetime.now(UTC)
        with gateway.open(log) as server:
            for number in range(5):
                self.send(server, message(number))
            self.send(server, message(5, 6, 7))
            _wait_until(lambda: server.status().stored == 8)
            _assert_adds_up(server)
        rows = log.read("rows").to_pylist()
        assert sorted(row["id"] for row in rows) == list(range(8))
        assert all(before <= row["received_at"] <= datetime.now(UTC) for row in rows)

    def test_a_message_that_does_not_fit_ends_nothing(self, gateway: Gateway, log: hr.Log) -> None:
        with gateway.open(log) as server:
            bad = [
                b'{"id": "x"}',
                b"no json",
                b"\xff\xfe",
                b'{"colour": 1}',
                b"[1, 2]",
                b"[" * 9_000,
            ]
            for number, payload in enumerate(bad):
                self.send(server, payload)
                self.send(server, message(number))
            _wait_until(lambda: server.status().stored == len(bad))
            _wait_until(lambda: server.status().refused >= len(bad))
            _assert_adds_up(server)
            server.check()
        assert sorted(row["id"] for row in log.read("rows").to_pylist()) == list(range(len(bad)))
        if not self.answers_senders:
            payloads = [letter["payload"] for letter in read_dead_letters(log, "rows")]
            assert sorted(payloads) == sorted(bad)

    def test_what_was_accepted_is_stored_when_it_ends(self, gateway: Gateway, log: hr.Log) -> None:
        with gateway.open(log) as server:
            for number in range(50):
                self.send(server, message(number))
            _wait_until(lambda: server.status().received == 50)
        _assert_adds_up(server)
        assert server.status().waiting_rows == 0
        assert sum(log.end_offsets("rows").values()) == server.status().stored == 50

    def test_beyond_the_bounds_every_row_is_counted(self, gateway: Gateway, log: hr.Log) -> None:
        policy = overload_policy("drop newest", max_rows=10, max_bytes=1 << 20, patience="1 second")
        with replace(gateway, policy=policy).open(log) as server:
            for start in range(0, 400, 8):
                self.send(server, message(*range(start, start + 8)))
            _wait_until(lambda: server.status().received == 400)
            _wait_until(lambda: server.status().waiting_rows == 0)
            _assert_adds_up(server)
        ids = [row["id"] for row in log.read("rows").to_pylist()]
        assert len(ids) == len(set(ids)) == server.status().stored

    def test_a_second_gateway_of_the_same_name_takes_over(
        self, gateway: Gateway, log: hr.Log
    ) -> None:
        with gateway.open(log) as older:
            self.send(older, message(1))
            _wait_until(lambda: older.status().stored == 1)
            if gateway.options.get("port"):
                gateway = replace(gateway, options={**gateway.options, "port": 0})
            with hr.open_log(log.address) as other, gateway.open(other) as newer:
                self.send(newer, message(2))
                _wait_until(lambda: newer.status().stored == 1)
                self.send(older, message(3))
                _wait_until(lambda: older.inbox.failure is not None)
                with pytest.raises((ProducerFenced, TransactionFenced)):
                    older.check()
                self.send(newer, message(4))
                _wait_until(lambda: newer.status().stored == 2)
        assert sorted(row["id"] for row in log.read("rows").to_pylist()) == [1, 2, 4]

    def test_a_topic_that_is_missing_or_its_own_is_refused(
        self, gateway: Gateway, log: hr.Log
    ) -> None:
        for topic in ("missing", "__gateway_counts"):
            other = replace(gateway, topics=(topic,))
            with pytest.raises(HeadraceError), other.open(log):
                pass

    def test_it_runs_until_it_is_told_to_stop(self, gateway: Gateway, log: hr.Log) -> None:
        stop, addresses = threading.Event(), list[str]()
        running = threading.Thread(
            target=gateway.run,
            kwargs={"log": log.address, "stop": stop, "on_ready": addresses.append},
        )
        running.start()
        _wait_until(lambda: addresses)
        stop.set()
        running.join(PATIENCE_S)
        assert not running.is_alive()


def _assert_adds_up(server: GatewayServer) -> None:
    status = server.status()
    fates = status.stored + status.repeated + status.dropped + status.refused
    assert status.received == fates + status.waiting_rows
    assert sum(status.reasons.values()) == status.dropped + status.refused


def _wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"still false after {PATIENCE_S:g} s"
        time.sleep(0.01)
