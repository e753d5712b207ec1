"""Gateways: rows come into the log from outside, over HTTP, StatsD's packets, ZeroMQ and AMQP.
`hr.gateways`.

    door = hr.gateways.http(["orders"], log="file:data") door.run()
    # or: headrace gateway http --topic orders --log file:data

Each function declares a gateway (`declared.Gateway`) and opens nothing. `docs/edges/gateways.md`
says what is promised.
"""

from __future__ import annotations

from headrace.gateways.declaration import Gateway, amqp, http, statsd, zeromq
from headrace.gateways.signatures import hook

__all__ = ["Gateway", "amqp", "hook", "http", "statsd", "zeromq"]
