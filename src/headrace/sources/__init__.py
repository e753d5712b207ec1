"""Sources of rows that are no database: files of a directory, an HTTP API,
an MQTT broker. `hr.sources`.

    orders = hr.sources.directory("incoming", topic="orders", log="file:data")
    orders.run()                                  # or: headrace capture dir:incoming --topic orders

In the order in which rows flow:

- `declaration`: what users call.
- `directory_source`, `http_source`, `mqtt_source`: the systems; `values_source`: rows that are
  written out.
- `base`: what a source of rows is, and how to write one; its rows go through the loop of captures.
- `decoder`: rows in the topic's columns, and dead letters.

Captures of databases are in `headrace.cdc`. `docs/edges/sources.md` says what is promised.
"""

from __future__ import annotations

from headrace.sources.base import RowSource, Source, SourceRows
from headrace.sources.declaration import directory, from_url, mqtt, poll, values

__all__ = ["RowSource", "Source", "SourceRows", "directory", "from_url", "mqtt", "poll", "values"]
