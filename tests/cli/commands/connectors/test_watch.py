"""`headrace watch`: once, and until it is stopped."""

import signal
import subprocess
import sys

import pytest

from headrace.cli.commands.connectors.watch import parse_receiver
from headrace.log import dead_letters as dead
from headrace.log.api import Log
from tests.cli.conftest import Run


def test_a_look_says_what_passes_its_limit(run: Run, log: Log, orders: str) -> None:
    assert run("watch", "--once", "--rule", "dead letters > 0").out == ""
    dead.divert(log, "orders", [dead.DeadLetter("here", "because")])
    assert (
        run("watch", "--once", "--rule", "dead letters > 0 of orders", code=3).out
        == "dead letters > 0 of orders: orders has 1\n"
    )
    assert "There is no rule" in run("watch", code=2).err


def test_a_watch_prints_matches_until_it_is_stopped(log: Log, address: str, orders: str) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace.cli",
        "watch",
        "--rule",
        "dead letters > 0 for 0 seconds",
        "--every",
        "100 ms",
        "--log",
        address,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    dead.divert(log, "orders", [dead.DeadLetter("here", "because")])
    line = next(each for each in process.stdout if "FIRING" in each)
    assert line.endswith("FIRING: dead letters > 0 for 0 seconds: orders has 1\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stdout.close()


def test_others_are_named_in_a_word() -> None:
    mail = parse_receiver("smtp://mail.example.com:25?to=ops@example.com&sender=us@example.com")
    assert (getattr(mail, "url", ""), getattr(mail, "to", ()), getattr(mail, "sender", "")) == (
        "smtp://mail.example.com:25",
        ("ops@example.com",),
        "us@example.com",
    )
    assert getattr(parse_receiver("webhook:https://example.com/hook"), "kind", "") == "webhook"
    with pytest.raises(Exception, match="is not a receiver"):
        parse_receiver("ops@example.com")
