"""Bodies of the HTTP gateway: CSV by the topic's types, gzip and zstd within bounds."""

import gzip
import time
import zlib
from datetime import UTC, datetime

import pyarrow as pa
import pytest

import headrace as hr
from headrace.gateways.http_bodies import decompress
from headrace.http.responses import Refused
from tests.gateways.conftest import Open, adds_up, order_ids
from tests.gateways.senders import JSON, LINES, post

CSV = {"Content-Type": "text/csv; charset=utf-8"}
LIMIT = 1 << 20


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


COMPRESS = {"gzip": gzip.compress, "zstd": zstd}


def test_csv_has_the_types_of_the_topic(log: hr.Log, opened: Open) -> None:
    log.create_topic(
        "typed",
        "id BIGINT, price DECIMAL(10, 2), note STRING, raw BINARY, flag BOOLEAN, day DATE, `at`"
        " TIMESTAMP, ratio DOUBLE, received_at TIMESTAMP",
    )
    running = opened(hr.gateways.http("typed", port=0))
    body = (
        b"id,price,note,raw,flag,day,at,ratio\r\n"
        b'1,9.50,"a, ""b""\nc",aGk=,true,2026-03-01,2026-03-01T12:00:00Z,0.25\r\n'
        b"2,,,,,,,\r\n"
    )
    code, answer = post(running.address, "/topics/typed", body, CSV)
    assert (code, answer["rows"]) == (200, 2), answer
    first, second = log.read("typed").to_pylist()
    assert first["received_at"] is not None
    assert {name: first[name] for name in ("id", "note", "raw", "flag", "ratio")} == {
        "id": 1,
        "note": 'a, "b"\nc',
        "raw": b"hi",
        "flag": True,
        "ratio": 0.25,
    }
    assert str(first["price"]) == "9.50"
    assert first["day"].isoformat() == "2026-03-01"
    assert first["at"] == datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert (second["id"], second["price"], second["flag"]) == (2, None, None)


def test_csv_may_have_fewer_columns_and_another_delimiter(log: hr.Log, opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    for body, headers in (
        (b"order_id;region\n1;north\n", CSV),
        (b"region\torder_id\nsouth\t2\n", {"Content-Type": "text/tab-separated-values"}),
        (b"\xef\xbb\xbforder_id\n3\n", CSV),
    ):
        code, answer = post(running.address, "/topics/orders", body, headers)
        assert code == 200, answer
    assert order_ids(log) == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (b"order_id,region\n1,north\nx,south\n", CSV, 400, "order_id"),
        (b"order_id,colour\n1,red\n", CSV, 400, "colour"),
        (b"order_id,region\n1\n", CSV, 400, "1 fields"),
        (b"order_id\n", CSV, 400, "no row"),
        (b"", CSV, 400, "no row"),
        (b"order_id\n1\n", {"Content-Type": "text/csv; charset=latin-1"}, 415, "latin-1"),
        (b"order_id\n1\n", {"Content-Type": "text/csv; header=absent"}, 415, "heading"),
    ],
)
def test_bad_csv_is_answered_with_the_reason_and_not_stored(
    log: hr.Log, opened: Open, body: bytes, headers: dict[str, str], status: int, says: str
) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    code, answer = post(running.address, "/topics/orders", body, headers)
    assert (code, says in answer["message"]) == (status, True), answer
    assert adds_up(running)
    assert order_ids(log) == []


@pytest.mark.parametrize("encoding", COMPRESS)
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'[{"order_id": 1}, {"order_id": 2}]', JSON),
        (b'{"order_id": 1}\n{"order_id": 2}\n', LINES),
        (b"order_id\n1\n2\n", CSV),
    ],
)
def test_compressed_bodies_are_rows(
    log: hr.Log, opened: Open, encoding: str, body: bytes, headers: dict[str, str]
) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    sent = {**headers, "Content-Encoding": encoding}
    code, answer = post(running.address, "/topics/orders", COMPRESS[encoding](body), sent)
    assert (code, answer.get("rows")) == (200, 2), answer
    assert order_ids(log) == [1, 2]


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_bomb_is_refused_before_it_is_large(log: hr.Log, opened: Open, encoding: str) -> None:
    """A few kilobytes that would be 64 MiB."""
    running = opened(hr.gateways.http("orders", port=0, body_bytes=LIMIT))
    bomb = zstd(b" " * (64 << 20)) if encoding == "zstd" else gzip_bomb(64 << 20)
    assert len(bomb) < LIMIT
    before = pa.total_allocated_bytes()
    sent = {**LINES, "Content-Encoding": encoding}
    code, answer = post(running.address, "/topics/orders", bomb, sent)
    assert (code, "1,048,576 bytes" in answer["message"]) == (413, True)
    assert running.status().reasons == {"too large": 1}
    assert pa.total_allocated_bytes() - before < 16 * LIMIT
    assert order_ids(log) == []


def gzip_bomb(size: int) -> bytes:
    stream = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = b" " * (1 << 20)
    parts = [stream.compress(block) for _ in range(size >> 20)]
    return b"".join(parts) + stream.flush()


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_body_that_is_cut_off_anywhere_is_refused_and_not_stored_in_part(encoding: str) -> None:
    body = b"".join(b'{"order_id": %d}\n' % number for number in range(500))
    compressed = COMPRESS[encoding](body)
    assert decompress(compressed, encoding, LIMIT) == body
    for length in range(1, len(compressed), 7):
        with pytest.raises(Refused) as refused:
            decompress(compressed[:length], encoding, LIMIT)
        assert refused.value.status == 400, length


@pytest.mark.parametrize("encoding", COMPRESS)
def test_what_follows_a_compressed_body_is_not_passed_over(encoding: str) -> None:
    compress = COMPRESS[encoding]
    assert decompress(compress(b"one\n") + compress(b"two\n"), encoding, LIMIT) == b"one\ntwo\n"
    with pytest.raises(Refused) as refused:
        decompress(compress(b"one\n") + b"and something else", encoding, LIMIT)
    assert refused.value.status == 400


def test_a_body_of_many_small_members_takes_no_longer_than_its_bytes() -> None:
    """Each member copied what followed it: 8 MiB of empty ones took minutes."""
    began_s = time.process_time()
    with pytest.raises(Refused, match="members"):
        decompress(gzip.compress(b"") * 400_000, "gzip", 8 << 20)
    assert time.process_time() - began_s < 2
    blocks = gzip.compress(b"x" * 65_280) * 100
    assert len(decompress(blocks, "gzip", 8 << 20)) == 6_528_000


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, LIMIT])
@pytest.mark.parametrize("encoding", COMPRESS)
def test_all_sizes_up_to_the_bound_come_back(encoding: str, size: int) -> None:
    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    assert decompress(COMPRESS[encoding](body), encoding, LIMIT) == body
    if size == LIMIT:
        with pytest.raises(Refused) as refused:
            decompress(COMPRESS[encoding](body + b"x"), encoding, LIMIT)
        assert refused.value.status == 413
