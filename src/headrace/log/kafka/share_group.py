"""The settings of a share group that a queue's promises rest on. Kafka keeps them per group, so they are set when a queue first receives."""

from __future__ import annotations

import time

from headrace.durations import format_us
from headrace.errors import ConfigurationError, NotSupported, RetryError
from headrace.log.kafka.cluster import Broker

VISIBILITY = "share.record.lock.duration.ms"
LIMIT = "share.delivery.count.limit"
PROMISES = {"share.auto.offset.reset": "earliest", "share.isolation.level": "read_committed"}
USUAL_MOST_DELIVERIES = 10  # what brokers allow unless told otherwise
APPLY_SECONDS = 10.0


class ShareGroup:
    """One group's settings, as one queue wants them."""

    def __init__(self, broker: Broker, group: str, delivery_limit: int) -> None:
        self._broker, self._group, self._limit = broker, group, delivery_limit
        self._visibility_ms: int | None = None

    def set_visibility(self, visibility_us: int) -> None:
        visibility_ms = visibility_us // 1000
        if visibility_ms == self._visibility_ms:
            return
        if self._visibility_ms is None:
            self._set_promises()
        self._set_lock(visibility_ms)
        self._visibility_ms = visibility_ms

    def _set_promises(self) -> None:
        """Kafka's own limit lies above ours: it drops a message in silence where we put it into dead letters."""
        try:
            self._broker.configure_group(self._group, PROMISES | {LIMIT: str(max(self._limit + 1, USUAL_MOST_DELIVERIES))})
        except ConfigurationError as error:
            raise NotSupported(
                f"A delivery limit of {self._limit} needs {LIMIT}={self._limit + 1} on Kafka, which the brokers refuse: {error.message}",
                fix="lower delivery_limit, or raise group.share.max.delivery.count.limit on the brokers.",
            ) from error

    def _set_lock(self, visibility_ms: int) -> None:
        try:
            self._broker.configure_group(self._group, {VISIBILITY: str(visibility_ms)})
        except ConfigurationError as error:
            raise NotSupported(
                f"A visibility of {format_us(visibility_ms * 1000)} is outside of what the brokers allow: {error.message}",
                fix="choose another one, or change group.share.min.record.lock.duration.ms and group.share.max.record.lock.duration.ms on the brokers.",
            ) from error
        self._await_applied(str(visibility_ms))

    def _await_applied(self, value: str) -> None:
        """Brokers learn of a setting a moment later; a message fetched before would have the old visibility."""
        deadline = time.monotonic() + APPLY_SECONDS
        while self._broker.group_settings(self._group).get(VISIBILITY) != value:
            if time.monotonic() > deadline:
                raise RetryError(f"The brokers have not taken over a setting of group {self._group!r}.", fix="try again.")
            time.sleep(0.02)
