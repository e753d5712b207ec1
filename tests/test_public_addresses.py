"""Public addresses: one case for each block of IANA's registries, its neighbours outside, and
addresses that lead to others.
"""

from ipaddress import ip_address, ip_network

import pytest

from headrace.public_addresses import is_in, is_public

REFUSED = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.0",
    "10.255.255.255",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.0.0.8",
    "192.0.0.9",
    "192.0.0.10",
    "192.0.0.170",
    "192.0.0.171",
    "192.0.0.255",
    "192.0.2.1",
    "192.31.196.1",
    "192.52.193.1",
    "192.88.99.1",
    "192.88.99.2",
    "192.168.0.1",
    "192.175.48.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::a00:1",
    "::ffff:10.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:192.0.0.8",
    "::ffff:0:127.0.0.1",
    "::ffff:0:8.8.8.8",
    "64:ff9b::10.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::192.88.99.1",
    "64:ff9b:1::1",
    "64:ff9b:1::8.8.8.8",
    "64:ff9b:1:ffff::10.0.0.1",
    "100::1",
    "100:0:0:1::1",
    "2001::1",
    "2001:0:808:808::1",
    "2001:1::1",
    "2001:2::1",
    "2001:3::1",
    "2001:4:112::1",
    "2001:10::1",
    "2001:20::1",
    "2001:30::1",
    "2001:1ff:ffff::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:808:808::1",
    "2620:4f:8000::1",
    "3fff::1",
    "3fff:fff::1",
    "4000::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fdff::1",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "feff::1",
    "ff02::1",
    "ff0e::1",
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "126.255.255.255",
    "128.0.0.1",
    "169.253.255.255",
    "169.255.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "191.255.255.255",
    "192.0.1.1",
    "192.0.3.0",
    "192.88.98.255",
    "192.88.100.0",
    "192.167.255.255",
    "192.169.0.0",
    "198.17.255.255",
    "198.20.0.0",
    "203.0.112.255",
    "203.0.114.0",
    "223.255.255.255",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "2000::1",
    "2001:200::1",
    "2001:4860:4860::8888",
    "2003::1",
    "2606:4700::6810:84e5",
    "2620:4f:7fff::1",
    "2a00:1450:4001::1",
    "3ffe::1",
]


@pytest.mark.parametrize("address", REFUSED)
def test_special_purpose_addresses_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_outside_of_special_blocks_are_public(address: str) -> None:
    assert is_public(ip_address(address))


def test_an_address_is_also_in_the_networks_of_the_one_it_leads_to() -> None:
    private = [ip_network("10.0.0.0/8")]
    assert is_in(ip_address("10.1.2.3"), private)
    assert is_in(ip_address("::ffff:10.1.2.3"), private)
    assert is_in(ip_address("64:ff9b::10.1.2.3"), private)
    assert not is_in(ip_address("::10.1.2.3"), private)
    assert not is_in(ip_address("11.1.2.3"), private)
    assert is_in(ip_address("fd00::1"), [ip_network("fd00::/8")])
