"""StatsD: lines against a plain reading of each, intervals against plain arithmetic, and
the gateway with a client from PyPI.
"""

import math
import re
import socket
import statistics
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.gateways.base import GatewayServer
from headrace.gateways.statsd_gateway import StatsdAggregator, StatsdValues, parse_packets
from tests.gateways.conftest import Open, adds_up
from tests.gateways.senders import in_another_process, printed
from tests.waits import wait_until

KINDS = {
    "c": "counter",
    "g": "gauge",
    "ms": "timer",
    "h": "histogram",
    "d": "histogram",
    "s": "set",
}


def reference(line: str) -> list[tuple[Any, ...]] | None:
    """(metric, kind, tags, number or member, is a delta, rate) of each value of a line; None if it
    is malformed.
    """
    head, *parts = line.rstrip("\r").split("|")
    metric, colon, text = head.partition(":")
    if (
        not colon
        or not metric
        or not text
        or not parts
        or parts[0] not in KINDS
        or re.search(r"[\x00-\x1f\ufffd]", line.rstrip("\r"))
        or re.match(r"[@#\s]", metric)
    ):
        return None
    rate, tags = 1.0, ""
    rest = parts[1:]
    if rest and rest[0].startswith("@"):
        if not number(rest[0][1:]) or not 0 < float(rest[0][1:]) <= 1:
            return None
        rate = float(rest.pop(0)[1:])
    if rest and rest[0].startswith("#"):
        tags = ",".join(sorted(filter(None, rest.pop(0)[1:].split(","))))
    if any(not part.startswith(("c", "T")) for part in rest):
        return None
    kind = KINDS[parts[0]]
    if kind == "set":
        return [(metric, kind, tags, text, False, rate)]
    return [
        (
            metric,
            kind,
            tags,
            float(each) if number(each) else None,
            kind == "gauge" and each[0] in "+-",
            rate,
        )
        for each in text.split(":")
    ]


def number(text: str) -> bool:
    return bool(
        re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII)
    ) and math.isfinite(float(text))


def shown(values: StatsdValues) -> list[tuple[Any, ...]]:
    columns = [
        values.metric.to_pylist(),
        values.kind.to_pylist(),
        values.tags.to_pylist(),
        values.value.tolist(),
        values.member.to_pylist(),
    ]
    rows = list(zip(*columns, values.is_delta.tolist(), values.rate.tolist(), strict=True))
    return [
        (m, k, t, member if k == "set" else v, d, r)
        for m, k, t, v, member, d, r in (rows[i] for i in values.order.tolist())
    ]


def expected(lines: list[str]) -> tuple[list[tuple[Any, ...]], int]:
    found, malformed = [], 0
    for line in filter(None, lines):
        values = reference(line)
        if values is None:
            malformed += 1
            continue
        found += [each for each in values if each[3] is not None]
        malformed += sum(each[3] is None for each in values)
    return found, malformed


LINES = [
    "a:1|c",
    "a:1|c",
    "a:2.5|c|@0.1",
    "g:+3|g",
    "g:-4.5|g",
    "g:10|g",
    "t:320|ms|#b:2,a:1",
    "t:1:2:3|ms",
    "t:1:x:3|h|@0.5|#one",
    "u:joe|s",
    "u:a:b:c|s",
    "d:4|d|#a|c:in-1|T1656581400",
    "bad",
    "a:|c",
    ":1|c",
    "a:1",
    "a:1|x",
    "a:nan|c",
    "a:inf|c",
    "a:1e999|c",
    "a:1|c|@0",
    "a:1|c|@2",
    "a:1|c|@x",
    "a:1|c|#",
    "a:1|c|#,,",
    "a b:1|c",
    "#a:1|c",
    "_e{5,4}:title|text",
    "_sc|check|0",
    "a:1|c\r",
    "a:.5|c",
    "a:5.|c",
    "a:+1|c",
    "ü.ö:1|c|#stadt:köln",
]


def test_lines_are_read_as_the_protocol_has_them() -> None:
    values = parse_packets("\n".join(LINES).encode())
    assert (shown(values), values.malformed) == expected(LINES)
    assert values.malformed == 15


LINE = st.one_of(
    st.sampled_from(LINES),
    st.text(st.sampled_from(list("ab:|@#.0123456789+-cgmshe,\t\r é\ufffd")), max_size=30),
    st.text(max_size=30),
)


@given(st.lists(LINE, max_size=30))
def test_any_lines_are_read_or_counted(lines: list[str]) -> None:
    lines = [
        part for line in lines for part in line.encode("utf-8", "replace").decode().split("\n")
    ]
    values = parse_packets("\n".join(lines).encode())
    assert (shown(values), values.malformed) == expected(lines)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_counted(data: bytes) -> None:
    values = parse_packets(data)
    assert values.malformed + len(values) >= sum(
        1 for line in data.split(b"\n") if line.rstrip(b"\r")
    )


def test_a_line_that_is_too_long_is_malformed_and_harms_no_other() -> None:
    values = parse_packets(b"a:1|c\n" + b"x" * 20_000 + b":1|c\nb:1|c")
    assert (values.metric.to_pylist(), values.malformed) == (["a", "b"], 1)


# Intervals


def rows_by_metric(batch: pa.RecordBatch) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["metric"], row["tags"]): row for row in batch.to_pylist()}


def test_an_interval_says_what_statsd_says() -> None:
    aggregator = StatsdAggregator()
    rng = np.random.default_rng(3)
    times = rng.integers(1, 1000, 500).tolist()
    for piece in range(5):  # however the packets fall into pieces
        text = [f"t:{each}|ms" for each in times[piece * 100 : piece * 100 + 100]]
        text += [
            "hits:2|c|@0.5",
            "hits:1|c",
            "users:ada|s",
            f"users:u{piece}|s",
            "level:5|g" if piece == 1 else "level:+1|g",
            "hits:1|c|#zone:b",
        ]
        assert aggregator.add(parse_packets("\n".join(text).encode())) == 0
    batch, count = aggregator.flush(0, 10_000_000)
    rows = rows_by_metric(batch)
    assert count == 5 * 106
    assert (rows["hits", ""]["value"], rows["hits", ""]["rate"], rows["hits", ""]["count"]) == (
        25.0,
        2.5,
        15.0,
    )
    assert rows["hits", "zone:b"]["value"] == 5.0
    assert rows["level", ""]["value"] == 8.0
    assert rows["users", ""]["value"] == 6.0
    timer = rows["t", ""]
    in_order = sorted(times)
    assert [timer[p] for p in ("p50", "p90", "p95", "p99")] == [
        in_order[math.ceil(p * 500) - 1] for p in (0.5, 0.9, 0.95, 0.99)
    ]
    assert (timer["count"], timer["min"], timer["max"], timer["sum"]) == (
        500.0,
        in_order[0],
        in_order[-1],
        sum(times),
    )
    assert timer["mean"] == pytest.approx(statistics.mean(times))


def test_gauges_go_on_and_everything_else_starts_anew() -> None:
    aggregator = StatsdAggregator()
    aggregator.add(parse_packets(b"level:7|g\nhits:1|c"))
    aggregator.flush(0, 1)
    aggregator.add(parse_packets(b"level:-2|g"))
    batch, _ = aggregator.flush(1, 2)
    assert {key: row["value"] for key, row in rows_by_metric(batch).items()} == {("level", ""): 5.0}
    batch, count = aggregator.flush(2, 3)
    assert ({key: row["value"] for key, row in rows_by_metric(batch).items()}, count) == (
        {("level", ""): 5.0},
        0,
    )


def test_a_sampled_timer_counts_for_what_it_stands_for() -> None:
    aggregator = StatsdAggregator()
    aggregator.add(parse_packets(b"t:1|ms|@0.1\nt:9|ms"))
    (row,) = aggregator.flush(0, 1_000_000)[0].to_pylist()
    assert (row["count"], row["p50"], row["p90"], row["p99"], row["sum"]) == (
        11.0,
        1.0,
        1.0,
        9.0,
        19.0,
    )


def test_metrics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateways.statsd_gateway.MAX_METRICS", 10)
    aggregator = StatsdAggregator()
    refused = aggregator.add(parse_packets("\n".join(f"m{i}:1|c" for i in range(25)).encode()))
    batch, count = aggregator.flush(0, 1)
    assert (refused, count, batch.num_rows) == (15, 10, 10)
    assert aggregator.add(parse_packets(b"new:1|c")) == 0


# The gateway


def port_of(running: GatewayServer) -> int:
    return int(running.address.rpartition(":")[2])


def test_a_client_from_pypi_is_understood(log: hr.Log) -> None:
    import statsd

    with hr.gateways.statsd(port=0, flush="200 ms").open(log) as running:
        client = statsd.StatsClient("127.0.0.1", port_of(running), prefix="shop")
        client.incr("orders")
        client.incr("orders", 4)
        client.decr("orders")
        client.gauge("queue", 10)
        client.gauge("queue", -3, delta=True)
        client.timing("checkout", 320)
        client.set("buyers", "ada")
        with client.pipeline() as together:
            together.timing("checkout", 100)
            together.set("buyers", "bob")
        client.close()
        wait_until(lambda: running.status().stored >= 9)
    rows = log.read("metrics").to_pylist()
    totals = {
        name: sum(row["value"] for row in rows if row["metric"] == name)
        for name in ("shop.orders",)
    }
    assert totals == {"shop.orders": 4.0}
    assert [row["value"] for row in rows if row["metric"] == "shop.queue"][-1] == 7.0
    assert max(row["max"] or 0 for row in rows if row["metric"] == "shop.checkout") == 320.0
    assert all(row["received_at"] >= row["ended_at"] >= row["started_at"] for row in rows)


def test_values_as_they_came(log: hr.Log, opened: Open) -> None:
    running = opened(hr.gateways.statsd("values", port=0, flush=None))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(
            b"t:1|ms\nt:2|ms|@0.5|#b,a\nu:x|s\ng:-1|g\nt:1|ms\nnonsense",
            ("127.0.0.1", port_of(running)),
        )
        wait_until(lambda: running.status().received == 6)
    wait_until(lambda: running.status().stored == 5)
    rows = log.read("values").to_pylist()
    assert [
        (r["metric"], r["kind"], r["tags"], r["value"], r["member"], r["is_delta"], r["stands_for"])
        for r in rows
    ] == [
        ("t", "timer", "", 1.0, None, False, 1.0),
        ("t", "timer", "a,b", 2.0, None, False, 2.0),
        ("u", "set", "", None, "x", False, 1.0),
        ("g", "gauge", "", -1.0, None, True, 1.0),
        ("t", "timer", "", 1.0, None, False, 1.0),
    ]
    assert running.status().reasons == {"malformed": 1}


FLOOD = """
import socket, sys
target, count = ("127.0.0.1", int(sys.argv[1])), int(sys.argv[2])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.connect(target)
    for i in range(count):
        sender.send(b"flood.%d:%d|c" % (i % 50, i % 7))
print(sum(i % 7 for i in range(count)))
"""


@pytest.mark.parametrize("policy", ["block", "drop newest"])
def test_a_flood_is_counted(log: hr.Log, policy: str) -> None:
    """What was sent was received, or the system says that it lost it; what was received was stored,
    dropped or refused.
    """
    sent = 50_000
    with hr.gateways.statsd("values", port=0, flush=None, policy=policy, max_rows=2_000).open(
        log
    ) as running:
        printed(in_another_process(FLOOD, port_of(running), sent))
        wait_until(
            lambda: (
                running.status().details["packets"]
                + running.status().details["packets_lost_by_the_system"]
                == sent
            )
        )
    status = running.status()
    assert adds_up(running)
    assert status.waiting_rows == 0
    assert status.received == status.details["packets"]
    assert sum(log.end_offsets("values").values()) == status.stored
    assert (status.refused, status.dropped if policy == "block" else 0) == (0, 0)


def test_a_flood_adds_up_when_it_is_put_together(log: hr.Log) -> None:
    with hr.gateways.statsd(port=0, flush="300 ms").open(log) as running:
        total = int(printed(in_another_process(FLOOD, port_of(running), 30_000)))
        wait_until(
            lambda: (
                running.status().details["packets"]
                + running.status().details["packets_lost_by_the_system"]
                == 30_000
            )
        )
    status = running.status()
    assert (status.stored, status.waiting_rows) == (status.received, 0)
    if not status.details["packets_lost_by_the_system"]:
        assert sum(row["value"] for row in log.read("metrics").to_pylist()) == total
