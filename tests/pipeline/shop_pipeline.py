"""The pipeline that most tests here declare: orders, returns and customers."""

import headrace as hr
from headrace.pipeline.stream import Stream, Table

ORDERS = (
    "order_id BIGINT, customer_id BIGINT, region STRING, amount DOUBLE, price DECIMAL(10,2), device"
    " STRING, placed_at TIMESTAMP, tags ARRAY<STRING>"
)
CUSTOMERS = "customer_id BIGINT, name STRING, tier STRING"


class Shop(hr.Pipeline):
    """A pipeline with its inputs at hand."""

    def __init__(self, name: str = "shop") -> None:
        super().__init__(name, log="file:data")
        self.orders: Stream = self.topic(
            "orders",
            schema=ORDERS,
            key="customer_id",
            event_time=hr.EventTime("placed_at"),
            partitions=4,
        )
        self.returns: Stream = self.topic("returns", schema=ORDERS, key="customer_id")
        self.customers: Table = self.table("customers", schema=CUSTOMERS, key="customer_id")
