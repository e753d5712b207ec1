"""What the sources for MariaDB and MySQL are made of, without a server: sets of GTIDs,
addresses.
"""

import pytest

from headrace.cdc.mysql_source.catalogue import (
    add_transaction,
    format_mysql_gtids,
    parse_mariadb_gtids,
    parse_mysql_gtids,
)
from headrace.errors import ConfigurationError
from headrace.mysql import connection_settings

A, B = "3e11fa47-71ca-11e1-9e33-c80aa9429562", "4e11fa47-71ca-11e1-9e33-c80aa9429562"


def test_sets_of_gtids() -> None:
    assert parse_mariadb_gtids("0-1-7,1-1-3") == {"0": "0-1-7", "1": "1-1-3"}
    assert parse_mariadb_gtids("") == parse_mysql_gtids("") == {}
    text = f"{A}:1-5:7,\n{B}:3:blue:1-2"
    assert parse_mysql_gtids(text) == {A: "1-5:7", B: "3", f"{B}:blue": "1-2"}
    assert parse_mysql_gtids(format_mysql_gtids(parse_mysql_gtids(text))) == parse_mysql_gtids(text)


@pytest.mark.parametrize(
    ("ranges", "number", "expected"),
    [
        ("", 1, "1"),
        ("1", 2, "1-2"),
        ("1-5", 6, "1-6"),
        ("1-5:7", 6, "1-7"),
        ("1-5:7", 8, "1-5:7-8"),
        ("1-5", 9, "1-5:9"),
        ("5-6", 1, "1:5-6"),
        ("1-5", 3, "1-5"),
    ],
)
def test_adding_a_transaction_to_a_set_of_gtids(ranges: str, number: int, expected: str) -> None:
    assert add_transaction(ranges, number) == expected


def test_an_address_with_tls() -> None:
    found = connection_settings(
        "mysql://shop@db:3307/sales?ssl_ca=/etc/ca.pem&ssl_verify_identity=true"
    )
    assert {
        name: found[name] for name in ("host", "port", "database", "ssl_ca", "ssl_verify_identity")
    } == {
        "host": "db",
        "port": 3307,
        "database": "sales",
        "ssl_ca": "/etc/ca.pem",
        "ssl_verify_identity": True,
    }
    with pytest.raises(ConfigurationError, match="did you mean 'ssl_ca'"):
        connection_settings("mysql://db/sales?ssl_cq=x")
    with pytest.raises(ConfigurationError, match="names no database"):
        connection_settings("mysql://db")
