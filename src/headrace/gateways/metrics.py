"""The counts of gateways as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateways.counting import GatewayStatus
from headrace.gateways.deliveries import Fate
from headrace.serve.prometheus import family

Samples = list[tuple[dict[str, str], float]]


def metrics(statuses: Sequence[GatewayStatus]) -> str:
    def of(status: GatewayStatus, **more: str) -> dict[str, str]:
        return {"gateway": status.gateway, "kind": status.kind, **more}

    fates: Samples = [(of(each, fate=fate), getattr(each, fate)) for each in statuses for fate in Fate]
    reasons: Samples = [(of(each, reason=reason), count) for each in statuses for reason, count in each.reasons.items()]
    details: Samples = [(of(each, what=name), value) for each in statuses for name, value in each.details.items()]
    lines = [
        *family("headrace_gateway_received_total", "counter", "Rows that came.", [(of(each), each.received) for each in statuses]),
        *family("headrace_gateway_rows_total", "counter", "Rows, by what became of them.", fates),
        *family("headrace_gateway_turned_away_total", "counter", "Rows that were refused or dropped, by why.", reasons),
        *family("headrace_gateway_waiting_rows", "gauge", "Rows that wait for the log.", [(of(each), each.waiting_rows) for each in statuses]),
        *family("headrace_gateway_waiting_bytes", "gauge", "Bytes that wait for the log.", [(of(each), each.waiting_bytes) for each in statuses]),
        *family("headrace_gateway_detail", "gauge", "What only this kind of gateway knows.", details),
    ]
    return "\n".join(lines) + "\n"
