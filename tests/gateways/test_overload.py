"""Senders that are faster than the log: memory stays bounded, policies do what they are named for, and every row sent is stored, dropped or refused."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.gateways.receiving import Receiving
from tests.gateways.conftest import ORDERS, Open, adds_up
from tests.gateways.senders import JSON, LINES, in_another_process, post, printed

FLOOD = """
import http.client, json, sys, threading, time
netloc, connections, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
body = "\\n".join(json.dumps({"order_id": i, "region": "r" * 500}) for i in range(200)).encode()
answers = {}
lock = threading.Lock()
def flood():
    connection = http.client.HTTPConnection(netloc, timeout=60)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection.request("POST", "/topics/orders", body, {"Content-Type": "application/x-ndjson"})
        answer = connection.getresponse()
        answer.read()
        with lock:
            answers[answer.status] = answers.get(answer.status, 0) + 200
threads = [threading.Thread(target=flood) for _ in range(connections)]
for each in threads: each.start()
for each in threads: each.join()
print(json.dumps(answers))
"""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def flooded(running: Receiving, connections: int, seconds: float) -> dict[str, int]:
    netloc = running.address.removeprefix("http://")
    found: dict[str, int] = json.loads(printed(in_another_process(FLOOD, netloc, connections, seconds), timeout_s=seconds + 120))
    return found


def check_flood(log: hr.Log, running: Receiving, answers: dict[str, int], policy: str) -> None:
    status = running.status()
    assert adds_up(running)
    assert status.received == sum(answers.values())
    assert status.stored == answers.get("200", 0) == sum(log.end_offsets("orders").values())
    assert status.dropped + status.refused == answers.get("503", 0)
    assert (status.waiting_rows, status.waiting_bytes) == (0, 0)
    assert {"block": status.dropped + status.refused, "buffer": status.dropped}.get(policy, status.refused) == 0


@pytest.mark.parametrize("policy", ["block", "buffer", "drop newest", "drop oldest"])
def test_every_row_of_a_flood_has_one_fate(log: hr.Log, opened: Open, policy: str) -> None:
    running = opened(hr.gateways.http("orders", port=0, policy=policy, most_rows=400))
    answers = flooded(running, connections=8, seconds=1.0)
    check_flood(log, running, answers, policy)
    assert answers["200"] > 0
    if policy != "block":
        assert answers["503"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["block", "buffer", "drop newest", "drop oldest"])
def test_a_minute_of_overload_takes_no_more_memory(log: hr.Log, opened: Open, policy: str) -> None:
    running = opened(hr.gateways.http("orders", port=0, policy=policy, most_rows=2_000, most_bytes=8 << 20))
    flooded(running, connections=16, seconds=5)
    before = resident_bytes()
    time.sleep(0.5)
    flooded(running, connections=16, seconds=60)
    assert resident_bytes() < before + (64 << 20)
    assert adds_up(running)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    with hr.open_log(f"file:{tmp_path_factory.mktemp('fuzzed') / 'log'}") as log:
        log.create_topic("orders", ORDERS)
        with hr.gateways.http("orders", port=0).open(log) as running:
            yield running


BODIES = st.one_of(st.binary(max_size=300), st.text(max_size=100).map(str.encode), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: json.dumps(v).encode()))


@settings(max_examples=60)
@given(body=BODIES, lines=st.booleans())
def test_any_body_is_answered_and_counted(fuzzed: Receiving, body: bytes, lines: bool) -> None:
    before = fuzzed.status()
    code, _ = post(fuzzed.address, "/topics/orders", body, LINES if lines else JSON)
    after = fuzzed.status()
    assert code in {200, 400}
    assert after.received > before.received
    assert adds_up(fuzzed)
    assert (after.refused > before.refused) == (code == 400)
