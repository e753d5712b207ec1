"""Requests under an Idempotency-Key are stored once: by several gateways at once, over restarts and
kills, however large they are. The same key with something else is a conflict.
"""

import gzip
import http.client
import json
import subprocess
import threading
import time

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import InputError
from headrace.gateways.idempotency import KeyRegister, KeyRetention, key_retention, keys_topic
from headrace.log.values import TopicInfo
from tests.gateways.conftest import Open, order_ids
from tests.gateways.processes import killed, started
from tests.gateways.senders import JSON, LINES, post
from tests.servers.database_server import free_port


def keyed(key: str, headers: dict[str, str] = LINES) -> dict[str, str]:
    return {**headers, "Idempotency-Key": key}


def test_two_gateways_at_once_store_each_request_once(log: hr.Log) -> None:
    """Each remembered the keys that it had seen itself, so 147 of 150 requests were doubled."""
    answers: list[list[dict[str, object]]] = [[], []]

    def send(address: str, found: list[dict[str, object]], together: threading.Barrier) -> None:
        for number in range(60):
            together.wait(30)
            body = b'{"order_id": %d}' % number
            code, answer = post(address, "/topics/orders", body, keyed(f"k{number}"))
            assert code == 200, answer
            found.append(answer)

    with (
        hr.open_log(log.address) as other_log,
        hr.gateways.http("orders", port=0, name="one").open(log) as one,
        hr.gateways.http("orders", port=0, name="other").open(other_log) as other,
    ):
        together = threading.Barrier(2)
        senders = [
            threading.Thread(target=send, args=(each.address, found, together))
            for each, found in zip((one, other), answers, strict=True)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(60)
        stored = one.status().stored, other.status().stored
        repeated = one.status().repeated, other.status().repeated
    assert order_ids(log) == list(range(60))
    assert sum(stored) == sum(repeated) == 60
    for pair in zip(*answers, strict=True):
        assert sorted("repeated" in answer for answer in pair) == [False, True]


def test_one_key_many_times_at_once_is_stored_once(log: hr.Log, opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    found: list[bool] = []

    def send() -> None:
        code, answer = post(running.address, "/topics/orders", b'{"order_id": 1}', keyed("k"))
        assert code == 200
        found.append("repeated" in answer)

    senders = [threading.Thread(target=send) for _ in range(16)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(30)
    assert sorted(found) == [False, *[True] * 15]
    assert order_ids(log) == [1]


def test_the_same_key_with_another_body_is_a_conflict(log: hr.Log) -> None:
    one, two = b'{"order_id": 1}', b'{"order_id": 2}'
    for is_first in (True, False):
        with hr.gateways.http("orders", port=0).open(log) as running:
            code, answer = post(running.address, "/topics/orders", one, keyed("k"))
            assert (code, "repeated" in answer) == (200, not is_first)
            code, answer = post(running.address, "/topics/orders", two, keyed("k"))
            assert (code, "another key" in answer["fix"]) == (409, True)
            compressed = {**keyed("k"), "Content-Encoding": "gzip"}
            code, answer = post(running.address, "/topics/orders", gzip.compress(one), compressed)
            assert (code, answer.get("repeated")) == (200, True)
            assert running.status().reasons == {"other body": 1}
    assert order_ids(log) == [1]


def test_a_key_is_of_one_topic(log: hr.Log, opened: Open) -> None:
    log.create_topic("returns", "order_id BIGINT")
    running = opened(hr.gateways.http(["orders", "returns"], port=0))
    for topic in ("orders", "returns"):
        code, answer = post(running.address, f"/topics/{topic}", b'{"order_id": 1}', keyed("k"))
        assert (code, "position" in answer) == (200, True)


def test_a_refused_request_may_be_corrected_under_its_key(log: hr.Log, opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    assert post(running.address, "/topics/orders", b'{"order_id": "x"}', keyed("k"))[0] == 400
    assert post(running.address, "/topics/orders", b'{"order_id": 1}', keyed("k"))[0] == 200
    assert order_ids(log) == [1]


def test_a_topic_that_is_created_again_has_no_keys(log: hr.Log, opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    for _ in range(2):
        code, answer = post(running.address, "/topics/orders", b'{"order_id": 1}', keyed("k"))
        assert (code, "position" in answer) == (200, True), answer
        log.delete_topic("orders")
        log.create_topic("orders", "order_id BIGINT")
    assert order_ids(log) == []


# How many, and for how long

SECOND_US = 1_000_000


class Keys:
    """A topic's register of ids, to which requests of one row are added at chosen times."""

    def __init__(self, log: hr.Log, retention: KeyRetention, name: str = "door") -> None:
        self.info: TopicInfo = log.topic("orders")
        self.register = KeyRegister(log, self.info, name, retention)

    def add(self, *names: str, at_us: int) -> None:
        self.register.refresh()
        rows = null_rows(self.info, len(names))
        ids = [(name, name.encode()) for name in names]
        assert self.register.append(rows, None, ids, at_us) is not None

    def known(self, *names: str) -> list[bool]:
        self.register._is_current = False  # as after a commit that was refused
        self.register.refresh()
        return [self.register.digest(name) is not None for name in names]


def null_rows(info: TopicInfo, count: int) -> pa.RecordBatch:
    columns = [pa.nulls(count, field.type) for field in info.arrow_schema]
    return pa.RecordBatch.from_arrays(columns, schema=info.arrow_schema)


def test_keys_are_remembered_by_number_also_by_the_next_gateway(log: hr.Log) -> None:
    retention = KeyRetention(3, 3600 * SECOND_US)
    now_us = time.time_ns() // 1000
    keys = Keys(log, retention)
    keys.add("a", "b", at_us=now_us)
    keys.add("c", "d", at_us=now_us)
    assert keys.known("a", "b", "c", "d") == [False, True, True, True]
    assert Keys(log, retention).known("a", "b", "c", "d") == [False, True, True, True]


def test_keys_are_remembered_by_time_also_by_the_next_gateway(log: hr.Log) -> None:
    retention = KeyRetention(100, 60 * SECOND_US)
    now_us = time.time_ns() // 1000
    keys = Keys(log, retention)
    keys.add("old", at_us=now_us - 100 * SECOND_US)
    keys.add("younger", at_us=now_us - 50 * SECOND_US)
    keys.add("new", at_us=now_us)
    assert keys.known("old", "younger", "new") == [False, True, True]
    assert Keys(log, retention).known("younger", "new") == [True, True]


def test_a_gateway_whose_clock_is_wrong_does_not_make_others_forget(log: hr.Log) -> None:
    retention = KeyRetention(100, 60 * SECOND_US)
    now_us = time.time_ns() // 1000
    keys = Keys(log, retention, "right")
    keys.add("a", at_us=now_us)
    Keys(log, retention, "ahead").add("b", at_us=now_us + 86_400 * SECOND_US)
    assert keys.known("a", "b") == [True, True]
    Keys(log, retention, "behind").add("c", at_us=now_us - 86_400 * SECOND_US)
    assert keys.known("a", "b", "c") == [True, True, True]


def test_keys_are_bounded_in_the_log_too(log: hr.Log) -> None:
    Keys(log, KeyRetention(1_000, 60 * SECOND_US)).add("a", at_us=time.time_ns() // 1000)
    info = log.topic(keys_topic("orders"))
    assert info.retention_bytes is not None
    assert info.retention_us == (86_400 + 60) * SECOND_US
    larger = KeyRetention(1_000_000, 7 * 86_400 * SECOND_US)
    Keys(log, larger).add("b", at_us=time.time_ns() // 1000)
    grown = log.topic(keys_topic("orders"))
    assert grown.retention_us == 8 * 86_400 * SECOND_US
    assert (grown.retention_bytes or 0) > info.retention_bytes


def test_impossible_retentions_are_refused() -> None:
    for max_keys, keep in ((0, "1 hour"), (20_000_000, "1 hour"), (5, "1 ms")):
        with pytest.raises(InputError, match="at least 1 second"):
            key_retention(max_keys, keep)


# Processes that are killed

ROWS = 120_000


@pytest.mark.process
def test_a_large_request_that_was_killed_half_way_is_stored_once(log: hr.Log) -> None:
    """A request of 120,000 rows was remembered by its first row, which was not there if the process
    was killed, and not found again behind so many others.
    """
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    body = b"\n".join(b'{"order_id": %d}' % number for number in range(ROWS))
    done = threading.Event()

    def send_until_stored() -> None:
        while not done.is_set():
            try:
                code, _ = post(address, "/topics/orders", body, keyed("large"))
            except (OSError, http.client.HTTPException):
                code = 0
            if code == 200:
                done.set()
            time.sleep(0.01)

    sender = threading.Thread(target=send_until_stored)
    command = ("http", "--topic", "orders", "--port", port, "--max-rows", 2 * ROWS)
    process = started(*command, log=log)
    sender.start()
    if not done.wait(0.2):
        killed(process)
        process = started(*command, log=log)
    sender.join(60)
    assert done.is_set()
    killed(process)
    with hr.gateways.http("orders", port=0, name=f"http.{port}").open(log) as running:
        code, answer = post(running.address, "/topics/orders", body, keyed("large"))
    assert (code, answer) == (200, {"topic": "orders", "rows": ROWS, "repeated": True})
    assert order_ids(log) == list(range(ROWS))


def two_gateways_are_killed_in_turn(log: hr.Log, *, kills: int, requests: int) -> None:
    """Two processes for one topic, each sender repeats a request to either until it has a 200."""
    ports = [free_port(), free_port()]

    def start(index: int) -> subprocess.Popen[str]:
        name = f"door{index}"
        return started("http", "--topic", "orders", "--port", ports[index], "--name", name, log=log)

    doors = [start(0), start(1)]
    acknowledged: list[int] = []

    def send(first: int) -> None:
        for request in range(requests):
            numbers = range(first + 5 * request, first + 5 * request + 5)
            body = json.dumps([{"order_id": number} for number in numbers]).encode()
            codes: set[int] = set()
            attempt = 0
            while codes != {200} or attempt < 2:  # also what was acknowledged is sent once more
                port = ports[attempt % 2]
                attempt += 1
                try:
                    codes = {
                        post(
                            f"http://127.0.0.1:{port}",
                            "/topics/orders",
                            body,
                            keyed(f"{first}-{request}", JSON),
                        )[0]
                    }
                except Exception:
                    codes = set()
                    time.sleep(0.02)
            acknowledged.extend(numbers)

    senders = [threading.Thread(target=send, args=(1_000_000 * i,)) for i in range(3)]
    for sender in senders:
        sender.start()
    for kill in range(kills):
        time.sleep(0.3)
        killed(doors[kill % 2])
        doors[kill % 2] = start(kill % 2)
    for sender in senders:
        sender.join(120)
    for door in doors:
        killed(door)
    assert len(acknowledged) == 3 * 5 * requests
    assert order_ids(log) == sorted(acknowledged)


@pytest.mark.process
def test_two_gateways_of_a_topic_that_are_killed_in_turn_store_each_request_once(
    log: hr.Log,
) -> None:
    two_gateways_are_killed_in_turn(log, kills=1, requests=15)


@pytest.mark.process
@pytest.mark.slow
def test_two_gateways_of_a_topic_that_are_killed_again_and_again(log: hr.Log) -> None:
    two_gateways_are_killed_in_turn(log, kills=20, requests=600)
