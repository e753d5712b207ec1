"""Which addresses a webhook may be sent to: those of the public internet, and internal ones that were allowed by name.

A name is resolved once for a connection, all its addresses are judged, and the connection goes to one of exactly these: a name that resolves differently a moment later leads nowhere else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from headrace.errors import ConfigurationError, InputError, TargetUnavailable

ALLOWED_VARIABLE = "HEADRACE_WEBHOOK_INTERNAL"
Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address
_TRANSLATED = ip_network("64:ff9b::/96")  # an IPv4 address stands in the last four bytes


def allowed_networks(declared: Iterable[str]) -> tuple[Network, ...]:
    """Internal networks that may be reached: those declared, and those of the environment."""
    given = [*declared, *filter(None, (part.strip() for part in os.environ.get(ALLOWED_VARIABLE, "").split(",")))]
    try:
        return tuple(ip_network(each, strict=False) for each in given)
    except ValueError as error:
        raise InputError(f"An internal network that webhooks may be sent to is written as 10.1.0.0/16: {error}.", fix=f"correct internal=[…] or {ALLOWED_VARIABLE}.") from None


def resolved(host: str, port: int, allowed: Sequence[Network]) -> list[str]:
    """The addresses of a host, all of which may be connected to."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TargetUnavailable(f"The name {host!r} cannot be resolved: {error}.", fix="see that the name is right, and that there is a network.") from error
    addresses = list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))
    for text in addresses:
        if not _may_be_reached(ip_address(text), allowed):
            raise ConfigurationError(
                f"{host!r} is {text}, which is no public address: webhooks are not sent to internal ones unless that was allowed.",
                fix=f"allow it, with internal=['{text}'] in hr.sinks.webhook(…), or {ALLOWED_VARIABLE}={text} in the environment; a network is written as 10.1.0.0/16.",
            )
    return addresses


def _may_be_reached(address: Address, allowed: Sequence[Network]) -> bool:
    meant = _meant(address)
    return (meant.is_global and not meant.is_multicast) or any(each in network for network in allowed for each in {address, meant} if each.version == network.version)


def _meant(address: Address) -> Address:
    """The IPv4 address that an IPv6 one may stand for."""
    if isinstance(address, IPv4Address):
        return address
    if address in _TRANSLATED:
        return IPv4Address(address.packed[-4:])
    inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
    return inner or address
