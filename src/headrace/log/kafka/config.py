"""From an address and options to what librdkafka's clients are configured with. Everything that
talks to the cluster asks here for its settings.

`kafka://host:port,host:port?security.protocol=SSL` names the cluster. Options of librdkafka (TLS,
SASL, sizes, timeouts) may stand in the address or be passed by name; a value `env:NAME` or
`file:PATH` is read from there, so that secrets need not be written down.
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

# What the log's promises rest on, with the reason; such an option is refused rather than overruled
# in silence.
KEPT = {
    "bootstrap.servers": "it is the address",
    "group.id": "it is given where a consumer or a queue is opened",
    "transactional.id": "it is made from the id of the producer or transaction",
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
FETCH_WAIT_MS = 5  # a bounded read that ends with a marker waits for one empty answer
LINGER_MS = 1
POLL_INTERVAL_MS = 300_000
HEARTBEAT_MS = 500  # a change in the group is noticed with a heartbeat


@dataclass(frozen=True)
class Cluster:
    """Where a Kafka cluster is, and how to speak to it."""

    bootstrap: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def client(self) -> Settings:
        """What every client has."""
        return {
            "bootstrap.servers": self.bootstrap,
            "client.id": "headrace",
            "allow.auto.create.topics": False,
            "logger": logger,
            "error_cb": _note_error,
            **self.options,
        }

    def admin(self) -> Settings:
        settings = self.client()
        del settings["allow.auto.create.topics"]
        return settings

    def producer(self) -> Settings:
        """Acknowledged by all replicas in sync, each record once, with a bounded buffer."""
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
        """For reading from one position to another: no group, and quick to notice that what follows
        is no row.
        """
        return {
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            **self._consumer(),
            "group.id": "headrace.reader",
            "auto.offset.reset": "error",
        }

    def member(self, group: str, session_ms: int) -> Settings:
        """For a member of a consumer group. Cooperative: who keeps a partition reads on while
        others are shared out anew.
        """
        return {
            "fetch.wait.max.ms": 100,
            "max.poll.interval.ms": max(POLL_INTERVAL_MS, session_ms),
            "heartbeat.interval.ms": max(min(session_ms // 4, HEARTBEAT_MS), 1),
            **self._consumer(),
            "group.id": group,
            "session.timeout.ms": session_ms,
            "partition.assignment.strategy": "cooperative-sticky",
            "auto.offset.reset": "error",
        }

    def sharer(self, group: str, max_records: int) -> Settings:
        """For a member of a share group: what was received is acknowledged one by one."""
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


def _note_error(error: object) -> None:
    """Errors are met where something is asked for and fails; without this, the client would raise
    fatal ones in the middle of its own calls.
    """
    logger.info("Kafka's client reports: %s", error)


def parse_address(address: str, options: Mapping[str, Any]) -> Cluster:
    """The cluster of `kafka://host:port?option=value`, with options passed by name taking
    precedence.
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
    named = {
        unquote(name): value for name, value in parse_qsl(url.query, keep_blank_values=True)
    } | _flattened(options)
    for name in named:
        if name in KEPT:
            raise ConfigurationError(
                f"The option {name!r} cannot be set: {KEPT[name]}.", fix="leave it out."
            )
    return Cluster(url.netloc, {name: secret(name, _text(value)) for name, value in named.items()})


def _flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options={...}` and keywords mean the same; Python names may have underscores for dots."""
    given = dict(options)
    nested = given.pop("options", None) or {}
    return {
        **nested,
        **{name if "." in name else name.replace("_", "."): value for name, value in given.items()},
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
