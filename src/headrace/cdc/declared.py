"""A capture, declared: what `hr.cdc.postgres(…)` and its siblings return. It opens nothing until it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigurationError, InputError
from headrace.log.names import check_name

if TYPE_CHECKING:
    from headrace.cdc.capturing import CaptureStatus
    from headrace.cdc.source import Source

DEFAULT_CHUNK_ROWS = 50_000


@dataclass(frozen=True)
class Capture:
    """Tables of one database, on their way into the log. `name` identifies it: position and progress are kept under it."""

    name: str
    kind: str
    opener: Callable[[Capture], Source] = field(repr=False, compare=False)
    tables: tuple[str, ...] = ()
    log: str | None = None
    prefix: str = ""
    partitions: int = 1
    preimages: bool = False
    snapshot: bool = True
    chunk_rows: int = DEFAULT_CHUNK_ROWS
    outbox: str | None = None
    """A table whose rows are events, for topics named by their `aggregate_type`."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_name(self.name, what="capture name")
        if self.chunk_rows < 1 or self.partitions < 1:
            raise InputError("chunk_rows and partitions must be at least 1.")

    def open(self) -> Source:
        """The source, ready to be started."""
        return self.opener(self)

    def run(
        self,
        *,
        log: str | None = None,
        stop: Event | None = None,
        until_caught_up: bool = False,
        start_over: bool = False,
        on_status: Callable[[CaptureStatus], None] | None = None,
    ) -> None:
        """Capture in this process until `stop` is set, or until everything that is there now has been taken in.

        `start_over` forgets the position and reads all tables again: for when the source has lost what follows it.
        """
        from headrace.cdc.capturing import Capturing
        from headrace.log import open_log

        with open_log(self.log_address(log)) as opened:
            Capturing(self, opened, start_over=start_over, on_status=on_status).run(stop=stop, until_caught_up=until_caught_up)

    def log_address(self, given: str | None = None) -> str:
        address = given or self.log
        if address is None:
            raise ConfigurationError(f"The capture {self.name!r} has no log.", fix="pass log=… (--log …).")
        return address

    def remove(self) -> list[str]:
        """Take away what the capture made in the database: triggers, or a publication and a slot. Topics stay."""
        source = self.open()
        try:
            return source.remove()
        finally:
            source.close()
