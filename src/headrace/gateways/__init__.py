"""Gateways: rows come into the log from outside, over HTTP, StatsD, ZeroMQ and AMQP. `hr.gateways`.

    orders = hr.gateways.http(["orders"], log="file:data")
    orders.run()         # or: headrace gateway http --topic orders --log file:data

In the order in which rows flow:

- `declaration`: what users call, and `Gateway`, which it returns.
- `http_gateway`, `statsd_gateway`, `zeromq_gateway`, `amqp_gateway`: the protocols.
- `signatures`: signed webhooks, for the HTTP gateway.
- `base`: what a gateway is, and how to write one for another protocol.
- `inbox`: the bounded queue in front of the log, and the policies for overload.
- `writer`: leaves out repeats, decodes rows and appends them.
- `metrics`: counts for Prometheus, and in the log for others.

`headrace.connector` has what gateways share with captures and sinks. `docs/edges/gateways.md` says
what is promised.
"""

from __future__ import annotations

from headrace.gateways.declaration import Gateway, amqp, from_url, http, statsd, zeromq
from headrace.gateways.signatures import hook

__all__ = ["Gateway", "amqp", "from_url", "hook", "http", "statsd", "zeromq"]
