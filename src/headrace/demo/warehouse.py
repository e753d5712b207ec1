"""The warehouse: a consumer group that packs a parcel for each order. The parcels and how far it has read are one transaction, so that an order has one parcel, whatever happens."""

from __future__ import annotations

import time

import pyarrow as pa

from headrace.demo.sending import Sender
from headrace.log.api import Log, Transaction

GROUP, PARCELS = "warehouse", "parcels"
PATIENCE_S = 60.0


class Warehouse:
    every_s = 0.5

    def __init__(self, log: Log, orders: Sender) -> None:
        self._log, self._orders = log, orders
        self._packed = 0
        log.create_topic(PARCELS, "order_id BIGINT, product_id BIGINT", key="order_id", exist_ok=True)
        self._consumer = log.consumer("orders", group=GROUP)
        self._last: Transaction | None = None

    def step(self, now_us: int) -> None:  # noqa: ARG002
        batches = self._consumer.poll(timeout="200 milliseconds")
        if not batches:
            return
        self._last = self._log.transaction("demo-warehouse") if self._last is None else self._last.next()
        with self._last as tx:
            for batch in batches:
                tx.append(PARCELS, pa.table({name: batch[name] for name in ("order_id", "product_id")}))
            tx.commit_offsets(GROUP, self._consumer.positions())
        self._packed += sum(batch.num_rows for batch in batches)

    def close(self, now_us: int) -> None:
        """To the end; the devices have sent everything before."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._packed < self._orders.rows and time.monotonic() < deadline_s:
            self.step(now_us)
        self._consumer.close()
