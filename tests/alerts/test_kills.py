"""Processes killed between recording an alert in the topic `alerts` and the receiver's response:
the next process sends it, under the same id.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.alerts.alert import TOPIC
from headrace.alerts.delivery import make_notifier
from headrace.log import dead_letters as dead
from tests.sinks.webhook_receiver import OK, WebhookReceiver
from tests.waits import wait_until

pytestmark = pytest.mark.process

RUNNER = """
import sys
import headrace as hr
from headrace.runtime import run
from headrace.testing.plain_spark import PlainSpark
run._start_spark = lambda _options: PlainSpark()
log, state, receiver = sys.argv[1:]
shop = hr.Pipeline("shop", log=log)
orders = shop.topic("orders", schema="id BIGINT, amount BIGINT")
shop.alert("large", orders.where("amount > 10"), to=hr.sinks.webhook(receiver, table="alerts"))
shop.run(state=state)
"""
Begin = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("orders", "id BIGINT, amount BIGINT")
        yield opened


def started(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "HEADRACE_WEBHOOK_INTERNAL": "127.0.0.0/8"},
    )


def killed(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)


def recorded(log: hr.Log) -> list[str]:
    return [row["id"] for row in log.read(TOPIC).to_pylist()] if TOPIC in log.topics() else []


def keys(receiver: WebhookReceiver) -> list[str]:
    return [request["Idempotency-Key"] for request in receiver.requests]


def of_a_watch(log: hr.Log) -> Begin:
    """The command as a user starts it; what it watches for is there already."""
    dead.divert(log, "orders", [dead.DeadLetter("here", "because")])
    rule = ("--rule", "dead letters > 0 for 0 seconds", "--every", "100 ms")
    return lambda url: started(
        "-m", "headrace.cli", "watch", *rule, "--to", f"webhook:{url}", "--log", log.address
    )


def of_a_pipeline(log: hr.Log, state: Path) -> Begin:
    with log.producer("orders") as producer:
        producer.append([{"id": 1, "amount": 5}, {"id": 2, "amount": 50}])
    return lambda url: started("-c", RUNNER, log.address, str(state), url)


@pytest.mark.parametrize("who", ["pipeline", "watch"])
def test_a_recorded_unsent_message_is_sent_by_the_next_process(
    log: hr.Log, tmp_path: Path, who: str
) -> None:
    begin = of_a_watch(log) if who == "watch" else of_a_pipeline(log, tmp_path / "state")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        port = held.getsockname()[1]
        first = begin(f"http://127.0.0.1:{port}/hook")
        try:
            wait_until(lambda: len(recorded(log)) == 1, timeout_s=60)
        finally:
            killed(first)
    receiver = WebhookReceiver(port=port)
    second = begin(f"http://127.0.0.1:{port}/hook")
    try:
        wait_until(lambda: len(receiver.requests) >= 1, timeout_s=60)
    finally:
        killed(second)
        receiver.stop()
    assert len(recorded(log)) == 1
    assert set(keys(receiver)) == set(recorded(log))


def test_a_message_without_an_answer_is_resent_with_its_key(log: hr.Log, tmp_path: Path) -> None:
    begin, receiver = of_a_pipeline(log, tmp_path / "state"), WebhookReceiver()
    notifier = make_notifier(hr.sinks.webhook(receiver.url, table="alerts"))
    note = f"alerting.shop.large.{notifier.identity}"
    processes: list[subprocess.Popen[bytes]] = []

    def behave(_headers: object, _rows: object) -> tuple[int, dict[str, str]]:
        if len(processes) == 1:
            killed(processes[0])  # while it waits for the answer
        return OK

    receiver.behave = behave
    try:
        processes.append(begin(receiver.url))
        wait_until(lambda: len(receiver.requests) >= 1, timeout_s=60)
        processes.append(begin(receiver.url))
        wait_until(lambda: len(receiver.requests) >= 2, timeout_s=60)
        wait_until(lambda: log.note(note) == "1", timeout_s=60)  # behind the first message
    finally:
        for process in processes:
            killed(process)
        receiver.stop()
    assert len(recorded(log)) == 1
    assert set(keys(receiver)) == set(recorded(log))
