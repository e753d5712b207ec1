"""Alerts: rows of a pipeline that somebody must hear of. `shop.alert(name, rows, to=…)` declares
one, `hr.alerts` has the ways to tell that are no sinks:

    shop.alert("spike", revenue.where("revenue > 10000"),
    to=[hr.sinks.webhook("https://example.com/hook"), hr.alerts.email("smtp://localhost",
    to="ops@example.com")])

`deciding` says what is told and when, and puts it into the topic `alerts`; `sending` follows that
topic for each receiver. `docs/edges/alerts.md` says what is promised.
"""

from __future__ import annotations

from headrace.alerts.alert import Alert, Email, email

__all__ = ["Alert", "Email", "email"]
