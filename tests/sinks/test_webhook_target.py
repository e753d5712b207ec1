"""The sink `webhook`, against a real HTTP server: the contract, as seen by a receiver that drops
repeats; receivers that are away, slow, refuse, redirect or talk nonsense; which addresses it goes
to.
"""

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import (
    ConfigurationError,
    InputError,
    NotSupported,
    TargetRefuses,
    TargetUnavailable,
)
from headrace.log.dead_letters import read_dead_letters
from headrace.retry import retry_after_s
from headrace.sinks.base import SinkSpec
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.sinks.sync import SinkLoop
from headrace.sinks.webhook_target import (
    WebhookEndpoint,
    WebhookSender,
    WebhookTarget,
    resolve,
)
from headrace.testing.sink_contract import SinkContract, account, caught_up
from headrace.testing.strikes import StrikePoint
from headrace.types.json_codec import decode_rows
from tests.sinks.webhook_receiver import OK, WebhookReceiver

SECRET = "a secret of some length"
LOOPBACK = "127.0.0.0/8"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebhookReceiver]:
    monkeypatch.setenv("HEADRACE_WEBHOOK_SECRET", SECRET)
    receiver = WebhookReceiver(secret=SECRET.encode())
    yield receiver
    receiver.stop()


RECEIVERS: dict[str, WebhookReceiver] = {}


class Readable(WebhookTarget):
    """One whose receiver can be asked what it has, which the contract wants to know."""

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        with self.atomic():
            applied = self.read_checkpoint()
        rows = RECEIVERS[self.sink.options["endpoint"].url].tables.get(self.table, {})
        return applied, iter(
            [
                pa.Table.from_batches(
                    [
                        decode_rows(
                            [json.dumps(row).encode() for row in rows.values()], self.shape.schema
                        ).batch
                    ]
                )
            ]
        )

    def clear(self) -> None:
        super().clear()
        RECEIVERS[self.sink.options["endpoint"].url].tables.pop(self.table, None)


def open_readable(sink: SinkSpec, shape: Any) -> Readable:
    return Readable(sink, shape)


class TestWebhook(SinkContract):
    is_atomic = False
    points = (
        StrikePoint(WebhookTarget, "_post", "before", 1),
        StrikePoint(WebhookTarget, "_post", "after", 1),
        StrikePoint(WebhookTarget, "_store", "before", 1),
        StrikePoint(WebhookTarget, "_store", "after", 1),
    )

    @pytest.fixture
    def sink(self, receiver: WebhookReceiver) -> Iterator[hr.sinks.Sink]:
        RECEIVERS[receiver.url] = receiver
        yield replace(
            hr.sinks.webhook(receiver.url, internal=LOOPBACK, request_rows=3), opener=open_readable
        )
        del RECEIVERS[receiver.url]


@dataclass(frozen=True)
class Payments:
    log: hr.Log
    receiver: WebhookReceiver
    sink: hr.sinks.Sink

    def add(self, *amounts: int) -> None:
        with self.log.producer("payments") as producer:
            producer.append([account(amount, amount) for amount in amounts])

    def sent(self) -> list[int]:
        return [entry["row"]["id"] for entry in self.receiver.rows]


@pytest.fixture
def payments(tmp_path: Path, receiver: WebhookReceiver) -> Iterator[Payments]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("payments", "id BIGINT, name STRING, amount DECIMAL(12, 2)", key="id")
        yield Payments(
            log, receiver, hr.sinks.webhook(receiver.url, internal=LOOPBACK, timeout="300 ms")
        )


def test_the_format_of_a_request(payments: Payments) -> None:
    payments.add(1, 2)
    caught_up(payments.sink, payments.log, "payments")
    id_ = payments.log.topic("payments").id
    assert payments.receiver.rows[0] == {
        "id": f"{id_}-0-0",
        "partition": 0,
        "offset": 0,
        "change": "insert",
        "row": {"id": 1, "name": "ada", "amount": "1.00"},
    }
    assert [headers["Idempotency-Key"] for headers in payments.receiver.requests] == [
        f"{id_}-0-0",
        f"{id_}-0-1",
    ]
    caught_up(payments.sink, payments.log, "payments")
    assert payments.receiver.repeats == 0


def test_a_receiver_that_is_busy_is_given_the_time_it_asks_for(payments: Payments) -> None:
    """And goes on with the row at which it was, not with the batch."""
    busy = [(503, {"Retry-After": "1"}), (429, {}), (500, {}), None]
    times: list[float] = []

    def behave(_headers: Any, rows: list[dict[str, Any]]) -> Any:
        if rows[0]["row"]["id"] == 3 and busy:
            times.append(time.monotonic())
            return busy.pop(0)
        return OK

    payments.receiver.behave = behave
    payments.add(*range(6))
    status = caught_up(payments.sink, payments.log, "payments").status
    assert payments.sent() == [0, 1, 2, 3, 4, 5]
    assert (status.refused, payments.receiver.repeats) == (0, 0)
    assert times[1] - times[0] >= 1.0


def pauses_s(caplog: pytest.LogCaptureFixture) -> list[float]:
    """How long the sink waited between sessions."""
    return [record.args[2] for record in caplog.records if "Trying again" in record.msg]  # type: ignore[index, misc]


def test_a_receiver_that_fails_now_and_then_is_not_given_longer_and_longer_pauses(
    payments: Payments, caplog: pytest.LogCaptureFixture
) -> None:
    """3% of answers were 503: a sink of 100 rows a batch took hours, since no batch was whole."""
    answers = itertools.count(1)
    payments.receiver.behave = lambda _headers, _rows: (503, {}) if next(answers) % 33 == 0 else OK
    payments.add(*range(1000))
    status = caught_up(payments.sink, payments.log, "payments").status
    assert payments.sent() == list(range(1000))
    assert (status.refused, status.failures, payments.receiver.repeats) == (0, 0, 0)
    assert pauses_s(caplog) == []


def test_a_session_that_made_progress_is_no_failure_in_a_row(
    payments: Payments, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails so often that sessions end, each behind where the one before ended."""
    answers = itertools.count()
    payments.receiver.behave = lambda _headers, _rows: (503, {}) if next(answers) % 15 > 8 else OK
    payments.add(*range(60))
    caught_up(payments.sink, payments.log, "payments")
    assert payments.sent() == list(range(60))
    assert len(pauses_s(caplog)) >= 5
    assert max(pauses_s(caplog)) <= 1.0


def test_refused_rows_become_dead_letters(payments: Payments) -> None:
    """Found among the others of their request, each once."""
    payments.receiver.behave = lambda _headers, rows: (
        (422, {}) if any(row["row"]["id"] in {3, 8} for row in rows) else OK
    )
    payments.add(*range(10))
    assert (
        caught_up(
            replace(payments.sink, options={**payments.sink.options, "request_rows": 4}),
            payments.log,
            "payments",
        ).status.refused
        == 2
    )
    assert sorted(payments.sent()) == [0, 1, 2, 4, 5, 6, 7, 9]
    found = read_dead_letters(payments.log, "payments.webhook")
    assert [dead_letter["source_offset"] for dead_letter in found] == [3, 8]
    assert "answers 422" in found[0]["reason"]
    assert "token" not in found[0]["reason"]


def test_a_receiver_that_refuses_everything_stops_the_sync(payments: Payments) -> None:
    payments.receiver.behave = lambda _headers, _rows: (400, {})
    payments.add(*range(300))
    with pytest.raises(TargetRefuses, match="100 rows in a row"):
        caught_up(payments.sink, payments.log, "payments")
    assert len(payments.receiver.requests) == 100


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "answers 401"),
        (404, "answers 404"),
        (410, "check the address"),
        (302, r"Redirects are not followed[\s\S]*http://10.0.0.1/"),
    ],
)
def test_a_misconfigured_receiver_ends_the_sync(payments: Payments, status: int, said: str) -> None:
    payments.receiver.behave = lambda _headers, _rows: (status, {"Location": "http://10.0.0.1/"})
    payments.add(1, 2)
    with pytest.raises(ConfigurationError, match=said):
        caught_up(payments.sink, payments.log, "payments")
    assert len(payments.receiver.requests) == 1
    payments.receiver.behave = lambda _headers, _rows: OK
    caught_up(payments.sink, payments.log, "payments")
    assert payments.sent() == [1, 2]


def test_a_wrong_secret(payments: Payments, monkeypatch: pytest.MonkeyPatch) -> None:
    payments.add(1)
    monkeypatch.setenv("HEADRACE_WEBHOOK_SECRET", "another")
    with pytest.raises(ConfigurationError, match=r"401[\s\S]*check the address, the secret"):
        caught_up(payments.sink, payments.log, "payments")
    monkeypatch.delenv("HEADRACE_WEBHOOK_SECRET")
    with pytest.raises(ConfigurationError, match="export HEADRACE_WEBHOOK_SECRET"):
        caught_up(payments.sink, payments.log, "payments")


def test_stopping_does_not_wait_for_the_batch(payments: Payments) -> None:
    stop = threading.Event()

    def behave(_headers: Any, rows: list[dict[str, Any]]) -> Any:
        if rows[0]["row"]["id"] == 2:
            stop.set()
        return OK

    payments.receiver.behave = behave
    payments.add(*range(50))
    SinkLoop(payments.sink, payments.log, "payments").run(stop=stop)
    assert payments.sent() == [0, 1, 2]
    caught_up(payments.sink, payments.log, "payments")
    assert payments.sent() == list(range(50))


def test_check_is_not_supported(payments: Payments) -> None:
    with pytest.raises(NotSupported, match="cannot be read back"):
        payments.sink.check("payments", log=payments.log.address)


def test_values_that_did_not_change_are_marked(tmp_path: Path, receiver: WebhookReceiver) -> None:
    """Nobody can be asked what they were."""
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table(
            "documents", "id BIGINT, title STRING, body STRING, _marks STRING", key="id"
        )
        with log.producer("documents") as producer:
            producer.upsert(
                [{"id": 1, "title": "b", "body": None, "_marks": '{"body": {"unchanged": true}}'}]
            )
            producer.delete([2])
        caught_up(hr.sinks.webhook(receiver.url, internal=LOOPBACK), log, "documents")
    assert [(entry["change"], entry["row"]) for entry in receiver.rows] == [
        (
            "upsert",
            {"id": 1, "title": "b", "body": None, "_marks": '{"body": {"unchanged": true}}'},
        ),
        ("delete", {"id": 2}),
    ]


# The sender alone


def test_a_receiver_that_trickles_its_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                for _ in range(400):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return
                    time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        began_s = time.monotonic()
        with (
            WebhookSender(
                WebhookEndpoint(
                    f"http://127.0.0.1:{server.getsockname()[1]}",
                    timeout_s=0.3,
                    internal=(LOOPBACK,),
                )
            ) as sender,
            pytest.raises(TargetUnavailable, match="longer than 0.3"),
        ):
            sender.send(b"{}", "one")
        assert time.monotonic() - began_s < 10, "it sends for 20 seconds"


def test_a_connection_that_was_closed_meanwhile_is_opened_again(receiver: WebhookReceiver) -> None:
    receiver.secret, receiver.behave = None, lambda _headers, _rows: (204, {"Connection": "close"})
    with WebhookSender(WebhookEndpoint(receiver.url, internal=(LOOPBACK,))) as sender:
        for number in range(3):
            sender.send(b'{"table": "t", "rows": []}', str(number))
    assert [headers["webhook-id"] for headers in receiver.requests] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "localhost",
        "[::1]",
        "[::ffff:10.0.0.1]",
        "[64:ff9b::10.0.0.1]",
        "0.0.0.0",
        "2130706433",
        "224.0.0.1",
        "192.0.0.8",
        "192.88.99.1",
        "[fec0::1]",
        "[64:ff9b:1::a00:1]",
        "[::127.0.0.1]",
        "[::ffff:0:127.0.0.1]",
    ],
)
def test_internal_addresses_are_refused_unless_allowed(host: str) -> None:
    with (
        WebhookSender(WebhookEndpoint(f"http://{host}:9/hook")) as sender,
        pytest.raises(ConfigurationError, match="no public address"),
    ):
        sender.send(b"{}", "one")


def test_networks_that_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_WEBHOOK_INTERNAL", "10.0.0.0/8, ::1")
    from headrace.sinks.webhook_target import allowed_networks

    assert resolve("10.9.8.7", 80, allowed_networks(())) == ["10.9.8.7"]
    assert resolve("::1", 80, allowed_networks(())) == ["::1"]
    assert resolve("8.8.8.8", 80, ()) == ["8.8.8.8"]
    with pytest.raises(ConfigurationError):
        resolve("192.168.0.1", 80, allowed_networks(()))
    with pytest.raises(InputError, match=r"10\.1\.0\.0/16"):
        allowed_networks(["nowhere"])


def test_a_header_that_http_cannot_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "Bearer x\r\nHost: y")
    with pytest.raises(ConfigurationError, match="'Authorization' has a name or a value"):
        WebhookSender(
            WebhookEndpoint("https://example.com/", headers={"Authorization": "env:TOKEN"})
        )


def test_how_long_a_receiver_asks_us_to_wait() -> None:
    assert [
        retry_after_s(text)
        for text in (None, "7", "999999", "soon", "Wed, 21 Oct 2015 07:28:00 GMT")
    ] == [0, 7, 3600, 0, 0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "ftp://x/"}, "not the address of a webhook"),
        ({"url": "https://x:port/"}, "not the address of a webhook"),
        ({"url": "https://x/a b"}, "%20"),
        ({"url": "https://user:pass@x/"}, "Authorization"),
        (
            {"secret": "hunter2"},
            r"must not be written into a program[\s\S]*env:HEADRACE_WEBHOOK_SECRET",
        ),
        ({"headers": {"Host": "y"}}, "set by Headrace itself"),
        ({"request_rows": 0}, "0 rows in a request"),
        ({"tabel": "x"}, "did you mean 'table'"),
    ],
)
def test_declared_wrongly(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        hr.sinks.webhook(**{"url": "https://example.com/hook", **settings})
