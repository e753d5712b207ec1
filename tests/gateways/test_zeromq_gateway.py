"""ZeroMQ with pyzmq on the other side: PUSH and PUB, what is read, what becomes a dead letter, and
floods.
"""

import time

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, InputError
from headrace.gateways.base import GatewayServer
from headrace.log import dead_letters as dead
from tests.gateways.conftest import Open, adds_up, order_ids
from tests.gateways.senders import in_another_process, printed
from tests.waits import wait_until

zmq = pytest.importorskip("zmq")


def pull(**settings: object) -> hr.gateways.Gateway:
    return hr.gateways.zeromq("orders", bind="tcp://127.0.0.1:*", name="pull", **settings)  # type: ignore[arg-type]


def test_pushed_messages_are_rows_in_their_order(log: hr.Log, opened: Open) -> None:
    running = opened(pull())
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(running.address)
        push.send(b'{"order_id": 1}')
        push.send(b'[{"order_id": 2}, {"order_id": 3}]')
        push.send(b'{"order_id": 4}\n{"order_id": 5}\n')
        push.send(b'{\n"order_id":\n6}')
        push.send(b"nonsense")
        push.send(b'{"order_id": "x"}')
        wait_until(lambda: running.status().received == 8)
    wait_until(lambda: running.status().waiting_rows == 0)
    assert order_ids(log) == [1, 2, 3, 4, 5, 6]
    assert [dead_letter["payload"] for dead_letter in dead.read_dead_letters(log, "orders")] == [
        b"nonsense",
        b'{"order_id": "x"}',
    ]
    assert (running.status().refused, running.status().reasons) == (2, {"does not fit": 2})


def test_a_subscription_hears_its_subjects(log: hr.Log, opened: Open) -> None:
    running = opened(
        hr.gateways.zeromq(
            "heard",
            socket="sub",
            bind="tcp://127.0.0.1:*",
            subjects=["eu."],
            format="raw",
            name="sub",
        )
    )
    with zmq.Context() as context, context.socket(zmq.PUB) as pub:
        pub.connect(running.address)
        deadline = time.monotonic() + 10
        while (
            not running.status().stored and time.monotonic() < deadline
        ):  # a subscription takes a moment to arrive
            pub.send_multipart([b"us.1", b"not for us"])
            pub.send_multipart([b"eu.1", b"\x00\xff"])
            time.sleep(0.05)
    rows = log.read("heard").to_pylist()
    assert {(row["subject"], row["body"]) for row in rows} == {("eu.1", b"\x00\xff")}


FLOOD = """
import sys, zmq
with zmq.Context() as context, context.socket(zmq.PUSH) as push:
    push.set(zmq.SNDHWM, 100)
    push.connect(sys.argv[1])
    for i in range(int(sys.argv[2])):
        push.send(b'{"order_id": %d}' % i)
    push.close(-1)
print("sent")
"""


@pytest.mark.parametrize("policy", ["block", "drop oldest"])
def test_a_flood_is_counted(log: hr.Log, opened: Open, policy: str) -> None:
    sent = 10_000
    running = opened(pull(policy=policy, max_rows=200))
    printed(in_another_process(FLOOD, running.address, sent))
    wait_until(lambda: running.status().received == sent and running.status().waiting_rows == 0)
    status = running.status()
    assert adds_up(running)
    assert sum(log.end_offsets("orders").values()) == status.stored
    check_policy(running, policy, order_ids(log), sent)


def check_policy(running: GatewayServer, policy: str, stored: list[int], sent: int) -> None:
    status = running.status()
    if policy == "block":
        assert stored == list(range(sent))
    else:
        assert stored[-200:] == list(range(sent - 200, sent))
        assert (status.refused, status.dropped) == (0, sent - len(stored))


def test_invalid_settings_are_refused(log: hr.Log) -> None:
    with pytest.raises(InputError, match="neither binds nor connects"):
        hr.gateways.zeromq("orders")
    with pytest.raises(InputError, match="did you mean 'pull'"):
        hr.gateways.zeromq("orders", socket="pul", bind="tcp://127.0.0.1:*")
    with (
        pytest.raises(ConfigurationError, match="cannot bind"),
        hr.gateways.zeromq("orders", bind="nowhere").open(log),
    ):
        pass
