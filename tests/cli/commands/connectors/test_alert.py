"""`headrace alert`: messages listed, alerts silenced."""

from headrace.alerts.alert import SCHEMA, TOPIC, make_message
from headrace.alerts.decision import silenced_until_us
from headrace.log.api import Log
from tests.cli.conftest import Run


def test_messages_are_listed(run: Run, log: Log) -> None:
    assert "There are no messages yet" in run("alert", "list").out
    log.create_topic(TOPIC, SCHEMA)
    with log.producer(TOPIC) as producer:
        producer.append(
            [
                make_message(
                    id=f"m{i}",
                    pipeline="shop",
                    alert="spike",
                    at_us=i,
                    fired=["{}"],
                    resolved=[],
                    active=1,
                    is_silenced=i == 2,
                    group={"region": f"r{i}"},
                ).row()
                for i in range(3)
            ]
        )
    assert [line["id"] for line in run("alert", "list", "--last", 2, "--json").lines] == [
        "m1",
        "m2",
    ]
    shown = run("alert", "list").out
    assert (shown.count("silenced"), "region r2" in shown) == (1, True)


def test_a_silenced_alert_can_be_unsilenced(run: Run, log: Log) -> None:
    assert (
        "spike is silent until"
        in run("alert", "silence", "spike", "--pipeline", "shop", "--for", "2 hours").out
    )
    assert silenced_until_us(log, "shop", "spike") > 0
    assert "is no longer silent" in run("alert", "unsilence", "spike", "--pipeline", "shop").out
    assert silenced_until_us(log, "shop", "spike") == 0
