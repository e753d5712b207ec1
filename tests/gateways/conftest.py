"""A fresh log with a topic, and gateways that run in this process and end with the test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import headrace as hr
from headrace.gateways import Gateway
from headrace.gateways.base import GatewayServer
from tests.cdc.conftest import started
from tests.servers.rabbitmq_server import RabbitmqServer

ORDERS = "order_id BIGINT, region STRING, amount DOUBLE, received_at TIMESTAMP"
Open = Callable[[Gateway], GatewayServer]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("orders", ORDERS, key="order_id", partitions=2)
        yield opened


@pytest.fixture
def opened(log: hr.Log) -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda gateway: stack.enter_context(gateway.open(log))


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitmqServer]:
    server = RabbitmqServer()
    started(server)
    yield server
    server.stop()


def order_ids(log: hr.Log, topic: str = "orders") -> list[int]:
    return sorted(row["order_id"] for row in log.read(topic).to_pylist())


def adds_up(running: GatewayServer) -> bool:
    """Every row that came has one fate, or waits; and none was turned away without a reason."""
    status = running.status()
    fates = status.stored + status.repeated + status.dropped + status.refused
    return (
        status.waiting_rows >= 0
        and status.received == fates + status.waiting_rows
        and sum(status.reasons.values()) == status.dropped + status.refused
    )
