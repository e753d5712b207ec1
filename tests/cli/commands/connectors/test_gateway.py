"""`headrace gateway`: what it refuses, and how it says how it goes. `tests/gateways/test_kills.py`
runs the command itself.
"""

import pytest

from headrace.cli.commands.connectors.gateway import parse_hook, status_line
from headrace.gateways.inbox import GatewayStatus
from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("http",), 1, "has no topic to append to"),
        (("http", "--topic", "nothing", "--port", 0), 1, "There is no topic 'nothing'"),
        (("http", "--topic", "orders", "--policy", "blok"), 1, "did you mean 'block'?"),
        (("http", "--hook", "pushes"), 2, "TOPIC=SIGNATURE:SECRET"),
        (("http", "--hook", "pushes=github:hunter2"), 1, "must not be written into a program"),
        (
            ("http", "--hook", "pushes=github:env:NOT_SET_ANYWHERE", "--port", 0),
            1,
            "the environment has no 'NOT_SET_ANYWHERE'",
        ),
        (("http", "--topic", "orders", "--host", "0.0.0.0"), 1, "append to orders"),
        (("statsd", "--flush", "1 ms"), 1, "too short"),
        (("zeromq", "--topic", "orders"), 1, "neither binds nor connects"),
        (
            ("amqp", "--topic", "orders", "--url", "http://x", "--queue", "q"),
            1,
            "begins with amqp://",
        ),
    ],
)
def test_arguments_that_are_refused(
    run: Run, orders: str, arguments: tuple[object, ...], code: int, message: str
) -> None:
    done = run("gateway", *arguments, code=code)
    assert message in " ".join((done.out + done.err).split())


def test_a_hook_is_written_in_one_word() -> None:
    hook = parse_hook("pushes=github:env:HOOK_SECRET")
    assert (hook.topic, hook.signature, hook.secrets, hook.raw) == (
        "pushes",
        "github",
        ("env:HOOK_SECRET",),
        True,
    )


def test_how_it_goes_is_one_line() -> None:
    status = GatewayStatus(
        "door",
        "http",
        received=15,
        stored=10,
        dropped=3,
        refused=2,
        reasons={"no room": 3, "malformed": 2},
        details={"packets": 7},
        failures=1,
        error="no room",
    )
    message = status_line(status, 5.0)
    assert (
        message
        == "door: 10 rows stored, 5 rows/s; 0 waiting (0 B); 3 dropped; 2 refused; because of:"
        " malformed 2, no room 3; packets: 7; failed 1 times in a row: no room"
    )
