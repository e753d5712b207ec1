"""Which addresses are public, so that requests to addresses that others choose (webhooks) do not
reach into the own network.

An address is public if it is globally routable by IANA's registries of special-purpose addresses,
as of 2025, and stands for no address that is not:

    8.8.8.8                 public
    10.1.2.3                private: refused
    192.0.0.8               in a special-purpose block: refused
    2606:4700::6810:84e5    public
    fec0::1                 outside of 2000::/3, the space of public IPv6 addresses: refused
    ::ffff:10.1.2.3         goes to 10.1.2.3: refused
    64:ff9b::808:808        goes to 8.8.8.8 by NAT64: public

The blocks are listed here because `ipaddress.is_global` differs between versions of Python. A name
is resolved once a connection, all its addresses are checked, and the connection goes to one of
exactly these. So a name that resolves to an internal address a moment later leads nowhere.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

SPECIAL_IPV4 = tuple(
    IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by a carrier's customers
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, and the metadata of clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments: NAT64, DS-Lite, anycast of the own network
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
"""All blocks that hold no ordinary host, also those that the registry calls globally reachable:
they lead to the nearest server of a protocol, which may be an own one.
"""
PUBLIC_IPV6 = IPv6Network("2000::/3")
"""The only space from which public addresses are assigned. Outside of it are loopback (::1),
IPv4-compatible (::a.b.c.d) and IPv4-translated addresses (::ffff:0:a.b.c.d), NAT64 for local use
(64:ff9b:1::/48), unique local (fc00::/7), link-local (fe80::/10), site-local (fec0::/10) and
multicast addresses.
"""
SPECIAL_IPV6 = tuple(
    IPv6Network(block)
    for block in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which leads to the IPv4 address in it
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
_MAPPED_IPV4 = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Whether an address is globally routable and of an ordinary host."""
    destination = _destination(address)
    if isinstance(destination, IPv4Address):
        return not any(destination in block for block in SPECIAL_IPV4)
    return destination in PUBLIC_IPV6 and not any(destination in block for block in SPECIAL_IPV6)


def is_in(address: Address, networks: Sequence[Network]) -> bool:
    """Whether an address, or the IPv4 address that it leads to, is in one of some networks."""
    return any(
        candidate in network
        for network in networks
        for candidate in {address, _destination(address)}
        if candidate.version == network.version
    )


def _destination(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address leads to; other addresses unchanged."""
    if isinstance(address, IPv6Address) and (address in _MAPPED_IPV4 or address in _NAT64):
        return IPv4Address(address.packed[-4:])
    return address


def resolved_addresses(host: str, port: int) -> list[Address]:
    """Return the addresses of a host. Raises OSError if its name cannot be resolved."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    texts = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries)
    return [ip_address(text) for text in texts]
