"""From an address and options to the settings of librdkafka's clients. Every client of the cluster
gets its settings from `ClusterConfig`.

`kafka://host:port,host:port?security.protocol=SSL` names the cluster. Options of librdkafka (TLS,
SASL, sizes, timeouts) may be part of the address or be passed by name. A value `env:NAME` or
`file:PATH` is read from the environment or a file, so that secrets need not be written down.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from headrace.errors import ConfigurationError, LogUnavailable
from headrace.secrets import secret

Settings = dict[str, Any]

SCHEME = "kafka"
logger = logging.getLogger("headrace.kafka")
logger.addHandler(logging.NullHandler())

# Options that the log's promises depend on, with the reason. They are refused, not silently
# ignored.
FIXED_OPTIONS = {
    "bootstrap.servers": "it is the address",
    "group.id": "it is given where a consumer or a queue is opened",
    "transactional.id": "it is derived from the id of the producer or transaction",
    "enable.idempotence": "appends are stored once",
    "acks": "an acknowledged append is on all replicas in sync",
    "isolation.level": "readers see committed rows only",
    "enable.auto.commit": "positions are committed by name",
    "enable.auto.offset.store": "positions are committed by name",
    "auto.offset.reset": "it is the consumer's `start` and `on_lost`",
    "enable.partition.eof": "reads stop at a position",
    "partitioner": "the partition is computed here, as Kafka's Java client does",
}

DEFAULT_MAX_BYTES = 1_000_000
QUEUED_KB = 32 << 10
SEND_TIMEOUT_MS = 30_000
TRANSACTION_TIMEOUT_MS = 60_000
FETCH_WAIT_MS = 5  # a bounded read that ends with a transaction marker waits for one empty response
LINGER_MS = 1
HEARTBEAT_MS = 500  # members learn of a rebalance with a heartbeat


@dataclass(frozen=True)
class ClusterConfig:
    """The address of a Kafka cluster and the client options; gives the settings of each kind of
    client.
    """

    bootstrap: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def client(self) -> Settings:
        """The settings that every client has."""
        return {
            "bootstrap.servers": self.bootstrap,
            "client.id": "headrace",
            "allow.auto.create.topics": False,
            "logger": logger,
            "error_cb": _log_error,
            **self.options,
        }

    def admin(self) -> Settings:
        settings = self.client()
        del settings["allow.auto.create.topics"]
        return settings

    def producer(self) -> Settings:
        """Settings of an idempotent producer: acknowledged by all in-sync replicas, with a bounded
        buffer.
        """
        return {
            "queue.buffering.max.kbytes": QUEUED_KB,
            "linger.ms": LINGER_MS,
            "message.timeout.ms": SEND_TIMEOUT_MS,
            **self.client(),
            "enable.idempotence": True,
            "acks": "all",
        }

    def transactional(
        self, transactional_id: str, timeout_ms: int = TRANSACTION_TIMEOUT_MS
    ) -> Settings:
        settings = self.producer() | {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
        }
        settings["message.timeout.ms"] = min(int(settings["message.timeout.ms"]), timeout_ms)
        return settings

    def reader(self) -> Settings:
        """Settings of a consumer without a group, for bounded reads. It waits only briefly for
        more, because the last offset may be a transaction marker that is never delivered.
        """
        return {
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            **self._consumer(),
            "group.id": "headrace.reader",
            "auto.offset.reset": "error",
        }

    def group_member(self, group: str, session_ms: int, poll_interval_ms: int) -> Settings:
        """Settings of a member of a consumer group. Rebalancing is cooperative: a member goes on
        reading the partitions that it keeps.
        """
        return {
            "fetch.wait.max.ms": 100,
            "max.poll.interval.ms": poll_interval_ms,
            "heartbeat.interval.ms": max(min(session_ms // 4, HEARTBEAT_MS), 1),
            **self._consumer(),
            "group.id": group,
            "session.timeout.ms": session_ms,
            "partition.assignment.strategy": "cooperative-sticky",
            "auto.offset.reset": "error",
        }

    def share_member(self, group: str, max_records: int) -> Settings:
        """Settings of a member of a share group, which acknowledges messages one by one."""
        settings = self.client()
        del settings["allow.auto.create.topics"]
        return settings | {
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
            "max.poll.records": max_records,
        }

    def _consumer(self) -> Settings:
        return {
            "queued.max.messages.kbytes": QUEUED_KB,
            **self.client(),
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
        }


def _log_error(error: object) -> None:
    """Log a client's error. Errors are raised where a request fails; without a callback, the client
    would raise fatal errors in the middle of unrelated calls.
    """
    logger.info("Kafka's client reports: %s", error)


def parse_address(address: str, options: Mapping[str, Any]) -> ClusterConfig:
    """The cluster of `kafka://host:port?option=value`. Options passed by name take precedence over
    those in the address.
    """
    url = urlsplit(address)
    if url.scheme != SCHEME or not url.netloc:
        raise LogUnavailable(
            f"{address!r} is not the address of a Kafka log.",
            fix="write kafka://host:port, with more brokers after commas.",
        )
    if "@" in url.netloc or url.path.strip("/"):
        raise ConfigurationError(
            "The address of a Kafka log has a user or a path in it.",
            fix="write kafka://host:port, and pass sasl.username and sasl.password as options.",
        )
    in_address = {
        unquote(name): value for name, value in parse_qsl(url.query, keep_blank_values=True)
    }
    keywords = dict(options)
    nested = keywords.pop("options", None) or {}
    # In keywords, underscores stand for dots.
    dotted = {
        name if "." in name else name.replace("_", "."): value for name, value in keywords.items()
    }
    all_options = {**in_address, **nested, **dotted}
    for name in all_options:
        if name in FIXED_OPTIONS:
            raise ConfigurationError(
                f"The option {name!r} cannot be set: {FIXED_OPTIONS[name]}.", fix="leave it out."
            )
    return ClusterConfig(
        url.netloc, {name: secret(name, _text(value)) for name, value in all_options.items()}
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
