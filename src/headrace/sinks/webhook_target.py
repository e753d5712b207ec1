"""The target `webhook`: rows are posted to a receiver, at least once (`noted_target`).

A request has up to `request_rows` rows:

    {"table": "orders", "topic": "orders", "rows": [{"id": "…-0-17", "partition": 0, "offset": 17, "change": "upsert", "row": {…}}]}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pyarrow as pa

from headrace.errors import NotSupported
from headrace.sinks.applied import Applied
from headrace.sinks.declared import Sink
from headrace.sinks.noted_target import NotedTarget
from headrace.sinks.shape import Shape
from headrace.sinks.target import RowsRefused
from headrace.sinks.webhook_sending import Receiver, Refused, Sender


class WebhookTarget(NotedTarget):
    def __init__(self, sink: Sink, shape: Shape) -> None:
        receiver: Receiver = sink.options["receiver"]
        identity = sink.name or f"{sink.table or shape.topic}.webhook.{hashlib.sha256(receiver.url.encode()).hexdigest()[:12]}"
        super().__init__(sink, shape, identity, request_rows=sink.options["request_rows"])
        self._sender = Sender(receiver)

    def close(self) -> None:
        self._sender.close()

    def _post(self, rows: pa.Table) -> None:
        ids, body = self._request(rows)
        try:
            self._sender.send(body, ids[0] if len(ids) == 1 else hashlib.sha256(json.dumps(ids).encode()).hexdigest())
        except Refused as error:
            if rows.num_rows == 1:
                self._count_refused(str(error))
            raise RowsRefused(str(error)) from error
        self._taken()

    def _request(self, rows: pa.Table) -> tuple[list[str], bytes]:
        """The rows' ids, and the request's body."""
        ids, entries = [], []
        for identity, partition, offset, change, text in self._messages(rows):
            ids.append(identity)
            head = json.dumps({"id": identity, "partition": partition, "offset": offset, "change": change})[:-1]
            entries.append(head.encode() + b', "row": ' + text + b"}")
        head = json.dumps({"table": self.table, "topic": self.shape.topic})[:-1]
        return ids, head.encode() + b', "rows": [' + b", ".join(entries) + b"]}"

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        raise NotSupported("A webhook's receiver cannot be read back, so there is nothing to compare with the log.", fix="compare at the receiver, by the rows' ids.")
