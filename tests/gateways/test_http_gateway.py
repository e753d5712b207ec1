"""The HTTP gateway, asked by curl and by bare connections: what is stored, what is refused and why,
and that every row is counted.
"""

import base64
import hashlib
import hmac
import http.client
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, InputError, UnknownTopic
from tests.gateways.conftest import Open, adds_up, order_ids
from tests.gateways.paced_log import PacedLog
from tests.gateways.senders import JSON, LINES, post
from tests.waits import wait_until


def test_curl_appends_an_object_an_array_and_lines(log: hr.Log, opened: Open) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    running = opened(hr.gateways.http("orders", port=0))
    bodies = [
        ("application/json", '{"order_id": 1, "region": "eu"}'),
        ("application/json; charset=utf-8", '[{"order_id": 2}, {"order_id": 3, "amount": 2.5}]'),
        ("application/x-ndjson", '{"order_id": 4}\n{"order_id": 5}\n'),
    ]
    for content_type, body in bodies:
        command = [
            curl,
            "-sS",
            "-f",
            f"{running.address}/topics/orders",
            "-H",
            f"Content-Type: {content_type}",
            "--data-binary",
            body,
        ]
        answer = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        )
        assert answer["topic"] == "orders"
        assert answer["position"].startswith("orders:")
    assert order_ids(log) == [1, 2, 3, 4, 5]
    status = running.status()
    assert (status.received, status.stored, status.refused) == (5, 5, 0)


def test_rows_get_the_time_at_which_they_came_and_not_what_the_sender_says(
    log: hr.Log, opened: Open
) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    before = datetime.now(UTC)
    assert (
        post(
            running.address,
            "/topics/orders",
            b'{"order_id": 1, "received_at": "2001-01-01T00:00:00Z"}',
        )[0]
        == 200
    )
    (row,) = log.read("orders").to_pylist()
    assert before <= row["received_at"] <= datetime.now(UTC)


def test_a_table_takes_upserts_and_deletes(log: hr.Log, opened: Open) -> None:
    log.create_table("customers", "id BIGINT, name STRING", key="id")
    running = opened(hr.gateways.http("customers", port=0))
    assert (
        post(
            running.address,
            "/topics/customers",
            b'[{"id": 1, "name": "Ada"}, {"id": 1, "_change_type": "delete"}]',
        )[0]
        == 200
    )
    assert [row["_change_type"] for row in log.read("customers").to_pylist()] == [
        "update_postimage",
        "delete",
    ]


def test_columns_that_come_later_are_known(log: hr.Log, opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    assert post(running.address, "/topics/orders", b'{"order_id": 1}')[0] == 200
    log.alter_topic("orders", add_columns="note STRING")
    assert post(running.address, "/topics/orders", b'{"order_id": 2, "note": "new"}')[0] == 200
    assert [row["note"] for row in log.read("orders").to_pylist() if row["order_id"] == 2] == [
        "new"
    ]


def test_columns_that_are_renamed_or_dropped_under_a_gateway_lose_nothing(
    log: hr.Log, opened: Open
) -> None:
    log.alter_topic("orders", add_columns="note STRING, fax STRING")
    running = opened(hr.gateways.http("orders", port=0))

    def send(order: str) -> int:
        return post(running.address, "/topics/orders", order.encode())[0]

    assert send('{"order_id": 1, "note": "a", "fax": "f"}') == 200
    log.alter_topic("orders", rename_columns={"note": "remark"}, drop_columns="fax")
    assert send('{"order_id": 2, "note": "b"}') == 200
    assert send('{"order_id": 3, "note": "c", "fax": "f"}') == 400
    assert send('{"order_id": 4, "note": "d"}') == 200
    assert send('{"order_id": 5, "remark": "e"}') == 200
    rows = {row["order_id"]: row["remark"] for row in log.read("orders").to_pylist()}
    assert rows == {1: "a", 2: "b", 4: "d", 5: "e"}


REFUSED = [
    ("/topics/orders", b'{"order_id": "x"}', JSON, 400, "does not fit", "Row 0: column 'order_id'"),
    (
        "/topics/orders",
        b'{"order_id": 1}\n{"colour": 2}\n',
        LINES,
        400,
        "does not fit",
        "Row 1: it has the unknown column 'colour'",
    ),
    ("/topics/orders", b"[1, 2", JSON, 400, "malformed", "not JSON"),
    ("/topics/orders", b"[]", JSON, 400, "empty", "no row"),
    ("/topics/orders", b"\n \n", LINES, 400, "empty", "no row"),
    ("/topics/orders", b"nonsense", JSON, 400, "does not fit", "not JSON"),
    ("/topics/orders", b"x", {"Content-Type": "text/plain"}, 415, "content type", "text/plain"),
    ("/topics/orders", b"x", {}, 415, "content type", "content type"),
    ("/topics/orders", b"x", {**JSON, "Content-Encoding": "br"}, 415, "content type", "br"),
    ("/topics/orders", b"x", {**JSON, "Content-Encoding": "gzip"}, 400, "malformed", "cut off"),
    ("/topics/ordres", b"{}", JSON, 404, "unknown topic", "did you mean 'orders'?"),
    (
        "/topics/orders",
        b'{"region": "' + b"x" * 2000 + b'"}',
        JSON,
        413,
        "too large",
        "1,000 bytes",
    ),
    (
        "/topics/orders",
        b'{"order_id": 1}',
        {**JSON, "Idempotency-Key": "k" * 300},
        400,
        "malformed",
        "255",
    ),
]


@pytest.mark.parametrize(("path", "body", "headers", "status", "reason", "says"), REFUSED)
def test_a_bad_request_is_answered_with_the_reason_counted_and_not_stored(
    log: hr.Log,
    opened: Open,
    path: str,
    body: bytes,
    headers: dict[str, str],
    status: int,
    reason: str,
    says: str,
) -> None:
    running = opened(hr.gateways.http("orders", port=0, body_bytes=1000))
    code, answer = post(running.address, path, body, headers)
    assert (code, says in answer["message"]) == (status, True), answer
    assert running.status().reasons == {reason: running.status().refused}
    assert adds_up(running)
    assert not order_ids(log)


def test_a_body_without_a_length_is_bounded_too(opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0, body_bytes=1000))
    address = running.address.removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=20)) as connection:
        connection.request(
            "POST",
            "/topics/orders",
            (b"x" * 100 for _ in range(100)),
            {**LINES, "Transfer-Encoding": "chunked"},
            encode_chunked=True,
        )
        assert connection.getresponse().status == 413
    assert running.status().reasons == {"too large": 1}
    assert running.status().waiting_bytes == 0


def test_a_sender_that_is_still_sending_sees_why_it_was_refused(opened: Open) -> None:
    """What came after the response, above `body_bytes`, broke the connection before it was read."""
    running = opened(hr.gateways.http("orders", port=0, body_bytes=1000))
    address = running.address.removeprefix("http://")

    def parts() -> Iterator[bytes]:
        yield b"x" * 2_000
        wait_until(lambda: running.status().refused == 1)
        for _ in range(20):
            time.sleep(0.01)  # so that the server reads each part before the next one
            yield b"x" * 1_000

    with closing(http.client.HTTPConnection(address, timeout=20)) as connection:
        connection.request(
            "POST",
            "/topics/orders",
            parts(),
            {**LINES, "Transfer-Encoding": "chunked"},
            encode_chunked=True,
        )
        assert connection.getresponse().status == 413


def test_a_repeated_request_is_stored_once_also_by_the_next_gateway(log: hr.Log) -> None:
    for expected in ("position", "repeated"):
        with hr.gateways.http("orders", port=0).open(log) as running:
            code, answer = post(
                running.address,
                "/topics/orders",
                b'[{"order_id": 1}, {"order_id": 2}]',
                {**JSON, "Idempotency-Key": "one"},
            )
            assert code == 200
            assert expected in answer
    assert order_ids(log) == [1, 2]
    assert running.status().repeated == 2


def test_many_at_once_are_all_stored_and_share_appends(log: hr.Log, opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0))

    def send(first: int) -> None:
        for number in range(first, first + 20):
            assert (
                post(running.address, "/topics/orders", f'{{"order_id": {number}}}'.encode())[0]
                == 200
            )

    threads = [threading.Thread(target=send, args=(100 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order_ids(log) == [100 * i + j for i in range(8) for j in range(20)]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/topics/orders", 405),
        ("PUT", "/topics/orders", 405),
        ("POST", "/elsewhere", 404),
        ("POST", "/health", 405),
    ],
)
def test_unknown_paths_are_answered_with_the_known_ones(
    opened: Open, method: str, path: str, status: int
) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    connection = http.client.HTTPConnection(running.address.removeprefix("http://"), timeout=20)
    connection.request(method, path, b"{}", JSON)
    answer = connection.getresponse()
    refusal = json.loads(answer.read())
    connection.close()
    assert (answer.status, "POST /topics/" in refusal["fix"]) == (status, True)


# Who may send


def test_a_token_is_asked_for(log: hr.Log, opened: Open, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-some-length\n")
    running = opened(hr.gateways.http("orders", port=0, token_file=tmp_path / "token"))
    assert post(running.address, "/topics/orders", b'{"order_id": 1}')[0] == 401
    assert (
        post(
            running.address,
            "/topics/orders",
            b'{"order_id": 1}',
            {**JSON, "Authorization": "Bearer wrong"},
        )[0]
        == 401
    )
    assert (
        post(
            running.address,
            "/topics/orders",
            b'{"order_id": 1}',
            {**JSON, "Authorization": "Bearer a-token-of-some-length"},
        )[0]
        == 200
    )
    assert running.status().reasons == {"HTTP 401": 2}
    assert order_ids(log) == [1]


def test_pages_of_other_origins_and_other_names_are_turned_away(opened: Open) -> None:
    running = opened(hr.gateways.http("orders", port=0))
    assert (
        post(
            running.address, "/topics/orders", b"{}", {**JSON, "Origin": "http://elsewhere.example"}
        )[0]
        == 403
    )
    assert (
        post(running.address, "/topics/orders", b"{}", {**JSON, "Host": "elsewhere.example"})[0]
        == 403
    )
    assert running.status().refused == 2


def test_listening_elsewhere_needs_a_token_or_signatures(
    log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "secret")
    with pytest.raises(ConfigurationError, match="append to orders"):
        hr.gateways.http("orders", host="0.0.0.0", port=0).open(log)
    hooks = [hr.gateways.hook("pushes", signature="github", secret="env:HOOK")]
    with hr.gateways.http(hooks=hooks, host="0.0.0.0", port=0).open(log) as running:
        assert post(running.address, "/topics/pushes", b"x")[0] == 401


def test_a_signed_body_is_stored_as_it_came(
    log: hr.Log, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "It's a Secret to Everybody")
    running = opened(
        hr.gateways.http(
            port=0, hooks=[hr.gateways.hook("pushes", signature="github", secret="env:HOOK")]
        )
    )
    body = b"Hello, World!"
    signed = (  # the example of GitHub's documentation
        "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    )
    headers = {
        "Content-Type": "text/plain",
        "X-Hub-Signature-256": signed,
        "X-GitHub-Delivery": "72d3162e",
        "Host": "hooks.example.com",
        "Cookie": "a=b",
    }
    assert post(running.address, "/topics/pushes?via=test", body, headers)[0] == 200
    assert post(running.address, "/topics/pushes", body, headers)[1]["repeated"] is True
    assert post(running.address, "/topics/pushes", body + b"!", headers)[0] == 401
    (row,) = log.read("pushes").to_pylist()
    assert (row["body"], row["content_type"], row["query"]) == (body, "text/plain", "via=test")
    assert dict(row["headers"])["x-github-delivery"] == "72d3162e"
    assert "cookie" not in dict(row["headers"])
    assert running.status().reasons == {"signature": 1}


def test_an_old_signature_of_stripe_is_a_replay(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "whsec_test")
    running = opened(
        hr.gateways.http(
            port=0,
            hooks=[
                hr.gateways.hook(
                    "payments", signature="stripe", secret="env:HOOK", window="1 minute"
                )
            ],
        )
    )
    for age_s, expected in ((0, 200), (120, 401), (-120, 401)):
        at = str(int(time.time()) - age_s)
        signed = hmac.new(b"whsec_test", at.encode() + b".{}", hashlib.sha256).hexdigest()
        assert (
            post(
                running.address,
                "/topics/payments",
                b"{}",
                {**JSON, "Stripe-Signature": f"t={at},v1={signed}"},
            )[0]
            == expected
        )


def test_a_signed_request_that_is_sent_again_is_stored_once_whatever_it_says_of_itself(
    log: hr.Log, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the time window; neither signature covers Idempotency-Key, so that says nothing."""
    monkeypatch.setenv("HOOK", "whsec_c2VjcmV0")
    hooks = [
        hr.gateways.hook("payments", signature="stripe", secret="env:HOOK"),
        hr.gateways.hook("events", signature="standard", secret="env:HOOK"),
    ]
    running, at = opened(hr.gateways.http(port=0, hooks=hooks)), str(int(time.time()))
    by_stripe = hmac.new(b"whsec_c2VjcmV0", at.encode() + b".{}", hashlib.sha256).hexdigest()
    by_standard = base64.b64encode(
        hmac.new(b"secret", f"e1.{at}.".encode() + b"{}", hashlib.sha256).digest()
    ).decode()
    signed = {
        "payments": {"Stripe-Signature": f"t={at},v1={by_stripe}"},
        "events": {
            "webhook-id": "e1",
            "webhook-timestamp": at,
            "webhook-signature": f"v1,{by_standard}",
        },
    }
    for topic, headers in signed.items():
        answers = [
            post(
                running.address,
                f"/topics/{topic}",
                b"{}",
                {**JSON, **headers, "Idempotency-Key": key},
            )
            for key in ("one", "two")
        ]
        assert [(code, "repeated" in answer) for code, answer in answers] == [
            (200, False),
            (200, True),
        ]
        assert len(log.read(topic).to_pylist()) == 1


@pytest.mark.parametrize("body", [b'{"object": "event", "id": "evt_1"}', b'{"id": 7}', b"no json"])
def test_a_retry_of_stripe_that_is_signed_anew_is_stored_once(
    log: hr.Log, opened: Open, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setenv("HOOK", "whsec_test")
    running, found = (
        opened(
            hr.gateways.http(
                port=0, hooks=[hr.gateways.hook("payments", signature="stripe", secret="env:HOOK")]
            )
        ),
        [],
    )
    for age_s, sent in ((60, body), (30, body), (0, body), (0, b'{"id": "evt_2"}')):
        at = str(int(time.time()) - age_s)
        signed = hmac.new(b"whsec_test", at.encode() + b"." + sent, hashlib.sha256).hexdigest()
        found.append(
            post(
                running.address,
                "/topics/payments",
                sent,
                {**JSON, "Stripe-Signature": f"t={at},v1={signed}", "Idempotency-Key": at},
            )
        )
    assert [(code, "repeated" in answer) for code, answer in found] == [
        (200, False),
        (200, True),
        (200, True),
        (200, False),
    ]
    assert [row["body"] for row in log.read("payments").to_pylist()] == [body, b'{"id": "evt_2"}']


def test_a_signed_request_that_times_out_is_answered_as_retryable(
    log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "whsec_test")
    slow: Any = PacedLog(log, rows_a_second=1)
    hooks, at = (
        [hr.gateways.hook("payments", signature="stripe", secret="env:HOOK")],
        str(int(time.time())),
    )
    signed = hmac.new(b"whsec_test", at.encode() + b".{}", hashlib.sha256).hexdigest()
    with hr.gateways.http(port=0, hooks=hooks, patience="200 ms").open(slow) as running:
        code, answer = post(
            running.address,
            "/topics/payments",
            b"{}",
            {**JSON, "Stripe-Signature": f"t={at},v1={signed}"},
        )
        slow.hurry()
    assert (code, answer["fix"]) == (503, "send it again, as it is: then it is stored once.")


def test_our_own_webhook_sink_can_send_to_the_gateway(
    log: hr.Log, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.sinks.webhook_target import WebhookEndpoint, WebhookSender

    monkeypatch.setenv("HOOK", "whsec_c2VjcmV0IG9mIGJvdGg=")
    running = opened(
        hr.gateways.http(
            port=0, hooks=[hr.gateways.hook("events", signature="standard", secret="env:HOOK")]
        )
    )
    with WebhookSender(
        WebhookEndpoint(f"{running.address}/topics/events", "env:HOOK", internal=("127.0.0.1",))
    ) as sender:
        sender.send(b'{"a": 1}', "event-1")
        sender.send(b'{"a": 1}', "event-1")
    assert [row["body"] for row in log.read("events").to_pylist()] == [b'{"a": 1}']


# What is declared


def test_invalid_settings_are_refused_at_declaration(log: hr.Log) -> None:
    with pytest.raises(InputError, match="did you mean 'buffer'"):
        hr.gateways.http("orders", policy="bufer")
    with pytest.raises(InputError, match="no topic to append to"):
        hr.gateways.http()
    with pytest.raises(InputError, match="did you mean 'max_rows'"):
        hr.gateways.http("orders", max_row=1)
    with pytest.raises(InputError, match="must not be written into a program"):
        hr.gateways.hook("pushes", signature="github", secret="hunter2")
    with pytest.raises(InputError, match="did you mean 'github'"):
        hr.gateways.hook("pushes", signature="gitub", secret="env:A")
    with pytest.raises(UnknownTopic, match="ordres"), hr.gateways.http("ordres", port=0).open(log):
        pass


def test_metrics_and_health_are_served(opened: Open) -> None:
    import urllib.request

    running = opened(hr.gateways.http("orders", port=0, name="door"))
    post(running.address, "/topics/orders", b'{"order_id": 1}')
    text = urllib.request.urlopen(f"{running.address}/metrics", timeout=10).read().decode()
    assert 'headrace_gateway_rows_total{gateway="door",kind="http",fate="stored"} 1' in text
    assert json.loads(urllib.request.urlopen(f"{running.address}/health", timeout=10).read()) == {
        "status": "ok"
    }
