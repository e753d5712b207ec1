"""The receivers of alerts: webhooks that are slow, fail, redirect, refuse or respond with nonsense;
mail servers that are unreachable; each on its own, each message under one id.
"""

import base64
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import headrace as hr
from headrace.alerts import delivery as sending
from headrace.alerts.alert import SCHEMA, TOPIC, Alert, AlertReceiver, make_message
from headrace.alerts.delivery import AlertSender
from headrace.log import dead_letters as dead
from headrace.retry import CircuitBreaker
from tests.alerts.mail_server import MailServer
from tests.sinks.webhook_receiver import OK, WebhookReceiver


class Quick(CircuitBreaker):
    """Pauses are short, so that tests are."""

    def record_failure(self, min_s: float = 0.0) -> None:
        super().record_failure(0.0)
        self._next_attempt_s = time.monotonic() + 0.01


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic(TOPIC, SCHEMA)
        yield opened


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    running = WebhookReceiver()
    yield running
    running.stop()


@pytest.fixture
def mails() -> Iterator[MailServer]:
    running = MailServer()
    yield running
    running.stop()


def webhook(receiver: WebhookReceiver) -> AlertReceiver:
    return hr.sinks.webhook(
        receiver.url, table="alerts", internal=["127.0.0.0/8"], timeout="500 ms"
    )


def make_sender(log: hr.Log, way: AlertReceiver) -> AlertSender:
    return AlertSender.open(log, "shop", Alert("hot", "alert.hot", (way,)), way, breaker=Quick())


def happened(
    log: hr.Log,
    *ids: str,
    alert: str = "hot",
    age: timedelta = timedelta(0),
    is_silenced: bool = False,
) -> None:
    at_us = int((datetime.now(UTC) - age).timestamp() * 1e6)
    with log.producer(TOPIC) as producer:
        producer.append(
            [
                make_message(
                    id=each,
                    pipeline="shop",
                    alert=alert,
                    at_us=at_us,
                    fired=['{"room": "attic"}'],
                    resolved=[],
                    active=1,
                    is_silenced=is_silenced,
                ).row()
                for each in ids
            ]
        )


def until(sending: AlertSender, is_so: Callable[[], bool], timeout_s: float = 20) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=sending.run, args=(stop,), daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    try:
        while not is_so():
            assert time.monotonic() < deadline, sending.status
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join(20)


def keys(receiver: WebhookReceiver) -> list[str]:
    return [request["Idempotency-Key"] for request in receiver.requests]


def test_a_new_receiver_hears_of_what_comes_from_now_on_and_goes_on_there(
    log: hr.Log, receiver: WebhookReceiver
) -> None:
    happened(log, "before")
    first = make_sender(log, webhook(receiver))
    happened(log, "one", "two")
    happened(log, "of another", alert="cold")
    happened(log, "silenced", is_silenced=True)
    until(first, lambda: first.status.sent == 2)
    happened(log, "three")
    second = make_sender(log, webhook(receiver))
    until(second, lambda: second.status.sent == 1)
    assert keys(receiver) == ["one", "two", "three"]


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}),
        (503, {"Retry-After": "0"}),
        (404, {}),
        (302, {"Location": "http://169.254.169.254/"}),
        None,
        "slow",
    ],
)
def test_a_failed_delivery_is_retried_with_its_key(
    log: hr.Log, receiver: WebhookReceiver, answer: object
) -> None:
    def behave(_headers: object, _rows: object) -> object:
        if len(receiver.requests) >= 3:
            return OK
        if answer == "slow":
            time.sleep(1.0)
            return OK
        return answer

    receiver.behave = behave  # type: ignore[assignment]
    sender = make_sender(log, webhook(receiver))
    happened(log, "one")
    until(sender, lambda: sender.status.sent == 1)
    assert set(keys(receiver)) == {"one"}
    assert len(keys(receiver)) >= 3
    assert sender.status.error is None


def test_a_refused_message_becomes_a_dead_letter_that_can_be_replayed(
    log: hr.Log, receiver: WebhookReceiver
) -> None:
    receiver.behave = lambda _headers, _rows: (400, {}) if not receiver.requests else OK
    sender = make_sender(log, webhook(receiver))
    happened(log, "one", "two")
    until(sender, lambda: sender.status.sent == 1)
    (dead_letter,) = dead.read_dead_letters(log, TOPIC)
    assert "answers 400" in dead_letter["reason"]
    assert dead.replay(log, TOPIC).replayed == 1
    again = make_sender(log, webhook(receiver))
    until(again, lambda: again.status.sent == 1)
    assert keys(receiver) == ["one", "two", "one"]


def test_a_message_that_nobody_took_for_a_day_is_given_up(
    log: hr.Log, receiver: WebhookReceiver
) -> None:
    receiver.behave = lambda _headers, _rows: (500, {})
    sender = make_sender(log, webhook(receiver))
    happened(log, "old", age=timedelta(days=2))
    until(sender, lambda: sender.status.given_up == 1)
    assert len(dead.read_dead_letters(log, TOPIC)) == 1


def test_nothing_is_sent_to_internal_addresses(log: hr.Log, receiver: WebhookReceiver) -> None:
    sender = make_sender(log, hr.sinks.webhook(receiver.url, table="alerts"))
    happened(log, "one")
    until(sender, lambda: sender.status.failures >= 2)
    assert "no public address" in (sender.status.error or "")
    assert not receiver.requests


def test_mail_is_sent_with_the_id_as_its_own(log: hr.Log, mails: MailServer) -> None:
    sender = make_sender(log, hr.alerts.email(mails.url, to=["ops@example.com", "dev@example.com"]))
    happened(log, "hot-1")
    until(sender, lambda: sender.status.sent == 1)
    (mail,) = mails.mails
    assert (mail["Message-ID"], mail["To"], mail["Subject"]) == (
        "<hot-1@headrace>",
        "ops@example.com, dev@example.com",
        "[firing] hot: 1 new, 1 active",
    )
    assert "fired: room attic" in str(mail.get_payload())


def test_a_mail_server_that_is_away_holds_up_nobody_else(
    log: hr.Log, receiver: WebhookReceiver, mails: MailServer
) -> None:
    mails.stop()
    by_mail, by_webhook = (
        make_sender(log, hr.alerts.email(mails.url, to="ops@example.com")),
        make_sender(log, webhook(receiver)),
    )
    happened(log, "one")
    until(by_mail, lambda: by_mail.status.is_open)
    until(by_webhook, lambda: by_webhook.status.sent == 1)
    assert "cannot be notified" in (by_mail.status.error or "")


def test_a_password_is_sent_in_the_clear_on_this_machine_alone(
    log: hr.Log, mails: MailServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAIL", "hunter2")
    mail = hr.alerts.email(
        mails.url.replace("smtp://", "smtp://ada@"), to="ops@example.com", password="env:MAIL"
    )
    sender = make_sender(log, mail)
    happened(log, "one")
    until(sender, lambda: sender.status.sent == 1)
    assert [base64.b64decode(login) for login in mails.logins] == [b"\0ada\0hunter2"]
    monkeypatch.setattr("headrace.alerts.delivery._is_loopback", lambda _server: False)
    again = make_sender(log, mail)
    happened(log, "two")
    until(again, lambda: again.status.failures >= 1)
    assert "in the clear" in (again.status.error or "")
    assert (len(mails.logins), len(mails.mails)) == (1, 1)


@pytest.mark.parametrize(
    ("reply", "is_refused"), [(b"550 no such user", True), (b"450 later", False)]
)
def test_a_mail_server_that_refuses(
    log: hr.Log, mails: MailServer, reply: bytes, is_refused: bool
) -> None:
    mails.refuses = reply
    sender = make_sender(log, hr.alerts.email(mails.url, to="ops@example.com"))
    happened(log, "one")
    until(sender, lambda: sender.status.refused == 1 if is_refused else sender.status.failures >= 2)
    assert not mails.mails


def test_a_message_that_cannot_be_delivered_is_given_up_after_a_day() -> None:
    assert sending.GIVE_UP_US == 86_400_000_000
