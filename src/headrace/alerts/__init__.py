"""Alerts: rows of a pipeline of which somebody is notified. `Pipeline.alert` declares one, and
`hr.alerts` has the receivers that are not sinks:

    shop.alert(
        "spike",
        revenue.where("revenue > 10000"),
        to=[
            hr.sinks.webhook("https://example.com/hook"),
            hr.alerts.email("smtp://localhost", to="ops@example.com"),
        ],
    )

In the order in which data flows:

    alert      the declaration, and the messages
    decision   which message is due, and when; messages go into the topic `alerts`
    delivery   one sender per receiver reads that topic and sends
    watch      rules over the log and the status of pipelines (`headrace watch`)

`docs/edges/alerts.md` states what is promised.
"""

from __future__ import annotations

from headrace.alerts.alert import Alert, Email, email

__all__ = ["Alert", "Email", "email"]
