"""A small metrics server: services send StatsD packets, and views show the rate, p50, p95 and p99
of each timer and minute, next to the same minute of yesterday and of last week.

As a server, it receives packets at 127.0.0.1:8125 and serves http://127.0.0.1:8765/views/timers:

    headrace run examples/19_metrics_server.py --log file:data

As a demonstration, it runs in this process with the test kit, and sends itself packets over UDP:

    python examples/19_metrics_server.py
"""

import socket
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import headrace as hr
from headrace.testing.pipelines import PipelineTest

SCHEMA = (
    "metric STRING, kind STRING, tags STRING, value DOUBLE, stands_for DOUBLE, received_at"
    " TIMESTAMP"
)

metrics = hr.Pipeline("metrics")
values = metrics.topic(
    "values",
    schema=SCHEMA,
    event_time=hr.EventTime("received_at", delay="2 seconds", idle="5 seconds", max_ahead="1 hour"),
    retention="14 days",
)
timers = values.where("kind = 'timer'")
minutes = (
    timers.window(hr.tumbling("1 minute"))
    .group_by("metric")
    .aggregate(
        calls=hr.agg.sum("stands_for"),
        rate=hr.agg.rate("stands_for"),
        p50=hr.agg.quantiles("value", 0.5),
        p95=hr.agg.quantiles("value", 0.95),
        p99=hr.agg.quantiles("value", 0.99),
    )
)
rolling = (
    timers.window(hr.hopping("5 minutes", every="1 minute"))
    .group_by("metric")
    .aggregate(average=hr.agg.avg("value"))
)
metrics.view("timers", minutes.compare("1 day", prefix="yesterday_"))
metrics.view("timers_last_week", minutes.compare("7 days", prefix="last_week_"))
metrics.view("rolling", rolling)
metrics.gateway(hr.gateways.statsd("values", flush=None, policy="drop newest"))


def timings(at: datetime, milliseconds: list[int]) -> list[dict[str, object]]:
    return [
        {
            "metric": "api",
            "kind": "timer",
            "tags": "",
            "value": float(duration),
            "stands_for": 1.0,
            "received_at": at,
        }
        for duration in milliseconds
    ]


def send_live(test: PipelineTest, milliseconds: list[int]) -> None:
    """Send timings through the gateway, as a service does."""
    with (
        hr.gateways.statsd("values", port=0, flush=None).open(test.log) as gateway,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as service,
    ):
        port = int(gateway.address.rpartition(":")[2])
        for duration in milliseconds:
            service.sendto(f"api:{duration}|ms\nhits:1|c".encode(), ("127.0.0.1", port))
        while gateway.status().stored < 2 * len(milliseconds):
            time.sleep(0.01)


def main() -> None:
    with tempfile.TemporaryDirectory() as root, PipelineTest(metrics, Path(root)) as test:
        now = datetime.now(UTC)
        for days, slower in ((7, 1), (1, 2)):
            # The current minute and the next one, since packets may be sent in either.
            for minute in (0, 1):
                test.feed(
                    "values",
                    timings(
                        now - timedelta(days=days, minutes=-minute),
                        [slower * each for each in range(1, 101)],
                    ),
                )
            test.settle()
        send_live(test, [4 * each for each in range(1, 101)])
        # A later row advances the watermark past the end of the minute.
        test.feed("values", timings(now + timedelta(minutes=5), [1]))
        test.settle()
        (today,) = [
            row
            for row in test.view("timers")
            if row["p50"] is not None and row["yesterday_p50"] is not None
        ]
        (same_day,) = [
            row
            for row in test.view("timers_last_week")
            if row["p50"] is not None and row["last_week_p50"] is not None
        ]
        print(f"api: {today['calls']:.0f} calls in a minute, {today['rate']:.1f} a second")
        for point in ("p50", "p95", "p99"):
            print(
                f"{point}: {today[point]:.0f} ms, yesterday {today[f'yesterday_{point}']:.0f}, last"
                f" week {same_day[f'last_week_{point}']:.0f}"
            )


if __name__ == "__main__":
    main()
