"""Connectors: what captures, gateways and sinks have in common.

A connector moves rows between a log and another system. There are three sorts of them:

- a *capture* (`headrace.cdc`) follows the changes of a database and writes them to topics;
- a *gateway* (`headrace.gateways`) receives rows over a protocol and appends them to topics;
- a *sink* (`headrace.sinks`) follows a topic and applies its rows to a target.

Each consists of three parts, and so does one that you write yourself:

1. *A declaration*: a frozen dataclass derived from `Connector` that says what is connected, and
   opens nothing. `hr.sinks.sqlite("shop.db")` returns one. Optional packages (database drivers) are
   imported by its `opener`, when it is run.
2. *An endpoint*: what the other system must be able to do, as an abstract class with one
   implementation a kind: `cdc.base.CaptureSource`, `gateways.base.GatewayServer`,
   `sinks.base.Target`. Write one of these to connect a new system; the base class says how.
3. *A loop*, the same for all kinds, that moves rows from one side to the other and commits:
   `cdc.capture.CaptureLoop`, `gateways.inbox.Inbox`, `sinks.sync.SinkLoop`. An endpoint raises
   `RetryError` for what passes by itself (the loop pauses and starts a new session) and
   `ConfigurationError` for what somebody must fix (the loop ends).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from inspect import signature
from threading import Event
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import urlsplit

from headrace.errors import (
    ConfigurationError,
    InputError,
    RetryError,
    TargetUnavailable,
    nearest,
)
from headrace.names import check_name
from headrace.retry import Backoff

BACKOFF = Backoff(first_s=0.2, longest_s=30.0)
"""Pauses between two sessions of a connector whose other system is away."""
CATCH_UP_PATIENCE_S = 60.0
"""How long a run that is to catch up goes on while the other system is away."""
STATUS_INTERVAL_S = 1.0
"""How often a running connector reports its status."""

Built = TypeVar("Built")


# Declarations


@dataclass(frozen=True, kw_only=True)
class Connector:
    """The declaration of a connector.

    Attributes:
        kind: Which implementation it uses, such as "sqlite" or "http".
        name: Identifies it among others: progress and dead letters are stored under it.
        options: What only this kind needs, such as a path or a URL.
    """

    noun: ClassVar[str] = "connector"

    kind: str
    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name, what=f"{self.noun} name")


@dataclass(frozen=True, kw_only=True)
class InboundConnector(Connector):
    """A connector that writes to a log: a capture or a gateway.

    Attributes:
        log: The log's address, unless it is given when the connector is run.
    """

    log: str | None = None

    def log_address(self, log: str | None = None) -> str:
        """Return the address of the log to write to: the given one, or the declared one.

        Raises:
            ConfigurationError: There is neither.
        """
        address = log or self.log
        if address is None:
            raise ConfigurationError(
                f"The {self.noun} {self.name!r} has no log.", fix="pass log=… (--log …)."
            )
        return address


def check_settings(function: str, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise InputError if a setting that was passed to a declaring function is unknown."""
    for setting in settings:
        if setting not in known:
            raise InputError(f"{function} has no setting {setting!r}: {nearest(setting, known)}")


def as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name, or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class PluginGroup:
    """Connectors that other packages bring, as entry points of one group.

    The name of an entry point is the scheme of the URLs that it handles. It refers to a function
    `declare(url, **settings)` that returns the declaration.

        [project.entry-points."headrace.sinks"]
        mongodb = "headrace_mongodb:sink"

    Attributes:
        name: The group, such as "headrace.sinks".
        returns: The class of what its functions return.
    """

    name: str
    returns: type[Connector]

    def schemes(self) -> list[str]:
        """Return the schemes of the installed plugins."""
        return sorted({point.name for point in entry_points(group=self.name)})

    def declare(self, scheme: str, url: str, settings: Mapping[str, Any]) -> Connector:
        """Declare a connector by the plugin that handles a scheme.

        Args:
            scheme: The scheme, one of `schemes`.
            url: The whole URL.
            settings: Passed on to the plugin's function.

        Raises:
            ConfigurationError: Two packages handle the scheme, the plugin cannot be imported, or it
                returns something else.
            InputError: The plugin has no such setting.
        """
        (point, *others) = entry_points(group=self.name, name=scheme)
        owners = [owner.dist.name if owner.dist else owner.value for owner in (point, *others)]
        if others:
            raise ConfigurationError(
                f"Several packages handle {scheme}: {', '.join(sorted(owners))}.",
                fix="uninstall all but one of them.",
            )
        try:
            declare = point.load()
        except Exception as error:
            raise ConfigurationError(
                f"The plugin for {scheme}:, {point.value} of the package {owners[0]}, cannot be"
                f" imported: {error}",
                fix=f"install what it needs, or another version of {owners[0]}.",
            ) from error
        _check_plugin_settings(declare, settings, owner=owners[0], scheme=scheme)
        declared = declare(url, **settings)
        if not isinstance(declared, self.returns):
            raise ConfigurationError(
                f"The plugin for {scheme}: of the package {owners[0]} returned"
                f" {type(declared).__name__}, not {self.returns.__name__}.",
                fix=f"let {point.value} return a {self.returns.__name__}.",
            )
        return declared


def _check_plugin_settings(
    declare: Callable[..., object], settings: Mapping[str, Any], *, owner: str, scheme: str
) -> None:
    parameters = signature(declare).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters][1:]
    for setting in settings:
        if setting not in known:
            raise InputError(
                f"{scheme}: of the package {owner} has no setting {setting!r}:"
                f" {nearest(setting, known)}"
            )


def build_from_url(
    url: str,
    builders: Mapping[str, Callable[[str], Built]],
    *,
    plugins: PluginGroup,
    settings: Mapping[str, Any],
    what: str,
    examples: str,
) -> Built:
    """Declare a connector by the scheme of its URL.

    Args:
        url: Such as `sqlite:shop.db` or `postgresql://user@host/database`.
        builders: By scheme, a function that takes the whole URL.
        plugins: Where other schemes are looked up. A plugin cannot replace one of `builders`.
        settings: What a plugin gets besides the URL.
        what: What the URL should name, for the error.
        examples: URLs that would do, for the error.

    Raises:
        InputError: Neither a builder nor a plugin has that scheme.
        ConfigurationError: The plugin cannot be used.
    """
    scheme = urlsplit(url).scheme
    if scheme in builders:
        return builders[scheme](url)
    installed = plugins.schemes()
    if scheme in installed:
        return cast("Built", plugins.declare(scheme, url, settings))
    shown = f"{scheme}:" if scheme else repr(url)
    raise InputError(
        f"{shown} is not {what}: {nearest(scheme, [*builders, *installed])}",
        fix=(
            f"give {examples}; or install the package that brings {scheme}: (its entry point is in"
            f" the group {plugins.name})."
            if scheme
            else f"give {examples}."
        ),
    )


def without_scheme(url: str) -> str:
    """Return what follows the scheme: `sqlite:shop.db` and `sqlite://shop.db` are `shop.db`."""
    return url.partition(":")[2].removeprefix("//")


# Running


@dataclass(kw_only=True)
class ConnectorStatus:
    """How a running connector is doing.

    Attributes:
        failures: Failures in a row; 0 while it works.
        error: What failed last; None while it works.
    """

    failures: int = 0
    error: str | None = None

    def record_failure(self, error: str) -> None:
        self.failures += 1
        self.error = error

    def record_success(self) -> None:
        self.failures = 0
        self.error = None


class Interval:
    """Says when something that happens now and then is due. The first time is at once."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s: float | None = None

    def restart(self) -> None:
        """Begin the interval now."""
        self._last_s = time.monotonic()

    def is_due(self) -> bool:
        """Return whether the interval has passed since this was last true."""
        now_s = time.monotonic()
        if self._last_s is not None and now_s - self._last_s < self._interval_s:
            return False
        self._last_s = now_s
        return True


def run_sessions(
    session: Callable[[], bool],
    *,
    what: str,
    stopped: Event,
    status: ConnectorStatus,
    report: Callable[[], None],
    logger: logging.Logger,
    patience_s: float = math.inf,
) -> None:
    """Run one session after the other until one is complete or `stopped` is set.

    A session connects to the other system, finds out where to go on, and works. When it raises
    `RetryError`, the failure is recorded in `status`, reported and logged, and after a pause the
    next session begins; the pause grows with each failure in a row. Other errors are raised.

    Args:
        session: Returns whether it is complete; if not, the next one begins at once.
        what: The connector, for the log message: "The sink orders.sqlite".
        stopped: Set by whoever wants the connector to stop.
        status: Where failures are recorded. The session records success.
        report: Shows the status to whoever watches.
        logger: The logger of the connector's package.
        patience_s: How long failures in a row may go on. The failure after which the next session
            would begin later is raised; a pause that the other side asked for is made once.
    """
    failing_since_s = 0.0
    while not stopped.is_set():
        try:
            if session():
                return
        except RetryError as error:
            if stopped.is_set():
                return
            status.record_failure(error.message)
            asked_s = error.wait_s if isinstance(error, TargetUnavailable) else 0.0
            pause_s = BACKOFF.pause_s(status.failures, min_s=asked_s)
            if status.failures == 1:
                failing_since_s = time.monotonic()
            failing_s = time.monotonic() - failing_since_s
            if failing_s + pause_s > max(patience_s, asked_s + 1.0):
                report()
                raise
            logger.warning("%s stopped: %s\nTrying again in %.1f s.", what, error, pause_s)
            report()
            stopped.wait(pause_s)
