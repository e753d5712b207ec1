"""A gateway, declared: what `hr.gateways.http(…)` and its siblings return. It opens nothing until it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigurationError, InputError
from headrace.gateways.policies import Policy
from headrace.log.names import check_name

if TYPE_CHECKING:
    from headrace.gateways.counting import GatewayStatus
    from headrace.gateways.receiving import Receiving
    from headrace.log.api import Log


@dataclass(frozen=True)
class Gateway:
    """Where rows come in, and the topics they go to. `name` identifies it: a second process with the same name takes over from the first."""

    name: str
    kind: str
    opener: Callable[[Gateway, Log], Receiving] = field(repr=False, compare=False)
    topics: tuple[str, ...] = ()
    log: str | None = None
    policy: Policy = field(default_factory=Policy)
    received: str = "received_at"
    """The column that gets the time at which a row came, in topics that have it."""
    schemas: dict[str, str] = field(default_factory=dict, repr=False)
    """Topics that the gateway makes itself, if they are missing."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_name(self.name, what="gateway name")
        if not self.topics:
            raise InputError(f"The gateway {self.name!r} has no topic to append to.", fix="name one.")

    def open(self, log: Log) -> Receiving:
        """The gateway, ready to be entered with `with`."""
        return self.opener(self, log)

    def run(
        self,
        *,
        log: str | None = None,
        stop: Event | None = None,
        on_status: Callable[[GatewayStatus], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        """Receive in this process until `stop` is set. `on_ready` hears where it listens."""
        from headrace.log import open_log

        tell = on_status or (lambda _status: None)
        with open_log(self.log_address(log)) as opened:
            receiving = self.open(opened)
            with receiving:
                if on_ready is not None:
                    on_ready(receiving.address)
                receiving.work(stop or Event(), tell)
            tell(receiving.status())
            receiving.check()
            receiving.tell()

    def log_address(self, given: str | None = None) -> str:
        address = given or self.log
        if address is None:
            raise ConfigurationError(f"The gateway {self.name!r} has no log.", fix="pass log=… (--log …).")
        return address
