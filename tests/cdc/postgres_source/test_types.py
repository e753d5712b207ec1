"""One table of all types that Postgres has, with their odd values: rows that a snapshot reads are
equal, value for value, to rows that come with the stream.
"""

from typing import Any

import pytest

import headrace as hr
from headrace.columnar.columns import HIDDEN_FIELDS, MARKS
from tests.cdc.captures import caught_up, folded_columns, postgres_capture
from tests.cdc.conftest import Postgres

EXTENSIONS = ("hstore", "citext", "ltree", "cube", "seg", "isn", "intarray")
TYPES: dict[str, list[str]] = {
    "boolean": ["true", "false"],
    "smallint": ["-32768", "32767"],
    "integer": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "real": ["'NaN'", "'-Infinity'", "'-0'", "1e-45", "3.4028235e38", "0.1"],
    "double precision": ["'NaN'", "'Infinity'", "'-0'", "5e-324", "1.7976931348623157e308", "0.1"],
    "numeric": ["'NaN'", "'Infinity'", "'-Infinity'", "1e100", "0.00000000000000000000000001"],
    "numeric(10,2)": ["'NaN'", "-99999999.99", "0", "1.5"],
    "numeric(38,38)": ["0.12345678901234567890123456789012345678", "0"],
    "numeric(60,2)": ["1e50", "'NaN'"],
    "numeric(3,-2)": ["12300", "-99900"],
    "numeric(3,5)": ["0.00123", "'NaN'"],
    "money": ["'-92233720368547758.08'", "12.34"],
    "bit(1)": ["B'1'", "B'0'"],
    "bit(9)": ["B'101010101'"],
    "bit varying(70)": ["B''", "B'1'", "repeat('10', 35)::varbit"],
    "bytea": ["''", "'\\x00ff10'", "'\\x5c2e'", "decode(repeat('ab', 3000), 'hex')"],
    "char(4)": ["'ab'", "''", "'ä'"],
    "varchar(5)": ["'abc'", "''", "' a '"],
    "text": [
        "''",
        "E'a,\"b\"\\nü\\\\\\t'",
        "E'\\r'",
        "E'one\\r\\ntwo'",
        "'\\.'",
        "'\\N'",
        "'null'",
        "' '",
        "'\"'",
        "E'\\U0001F600'",
        "repeat('x', 9000)",
    ],
    '"char"': ["'a'", "''"],
    "name": ["'orders'"],
    "json": ['\'{"a" :  [1], "a":null}\'', "'null'", "'\"\\u0041\"'"],
    "jsonb": ['\'{"b":[1.50], "a":null}\'', "'null'", "'1e400'"],
    "jsonpath": ["'$.a[*] ? (@ > 1)'"],
    "xml": ["'<a b=\"1\"><![CDATA[x]]></a>'", "''"],
    "uuid": ["'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'"],
    "date": ["'2026-02-28'", "'infinity'", "'-infinity'", "'0044-03-15 BC'", "'99999-01-01'"],
    "time": ["'12:34:56.789012'", "'24:00:00'", "'00:00:00'"],
    "time(3)": ["'12:34:56.789012'"],
    "timetz": ["'12:34:56.7+02'", "'24:00:00-15:59:59'"],
    "timestamp": [
        "'2026-02-28 12:00:00.000001'",
        "'infinity'",
        "'-infinity'",
        "'0044-03-15 10:00:00 BC'",
        "'294276-12-31 23:59:59.999999'",
        "'0001-01-01'",
    ],
    "timestamp(0)": ["'2026-02-28 12:00:00.6'"],
    "timestamptz": [
        "'2026-02-28 12:00:00.5+02'",
        "'infinity'",
        "'1883-11-18 12:03:57-04:56:02'",
        "'0001-01-01 00:00:00+00 BC'",
    ],
    "interval": [
        "'1 year 2 days 3.000004 seconds'",
        "'-1 month +2 days -00:00:00.5'",
        "'0'",
        "'178000000 years'",
    ],
    "interval day to second": ["'3 days 04:05:06.7'"],
    "inet": ["'10.0.0.1/8'", "'::1'", "'10.0.0.1'"],
    "cidr": ["'10.0.0.0/8'", "'2001:db8::/32'"],
    "macaddr": ["'08:00:2b:01:02:03'"],
    "macaddr8": ["'08:00:2b:01:02:03:04:05'"],
    "point": ["'(1.5,-0)'", "'(NaN,Infinity)'"],
    "line": ["'{1,2,3}'"],
    "lseg": ["'[(0,0),(1,1.1)]'"],
    "box": ["'(1,1),(0,0)'"],
    "path": ["'[(0,0),(1,1)]'", "'((0,0),(1,1))'"],
    "polygon": ["'((0,0),(1,1),(2,0))'"],
    "circle": ["'<(0,0),1.5>'"],
    "int4range": ["'[1,5)'", "'empty'", "'(,)'"],
    "int8range": ["'[1,5]'"],
    "numrange": ["'[1.10,2.0]'"],
    "tsrange": ["'[2026-01-01,infinity)'"],
    "tstzrange": ["'[2026-01-01 00:00+02,)'"],
    "daterange": ["'[0044-03-15 BC,2026-01-01]'"],
    "int4multirange": ["'{[1,2),[5,9)}'", "'{}'"],
    "tsvector": ["'a fat cat':: tsvector", "to_tsvector('english', 'The fat cats')"],
    "tsquery": ["'fat & !rat'"],
    "oid": ["4000000000"],
    "regclass": ["'pg_class'", "'things'"],
    "pg_lsn": ["'16/B374D848'"],
    "xid8": ["'18446744073709551615'"],
    "integer[]": ["'{}'", "'{1,NULL,3}'", "'[0:1]={7,8}'", "'{{1,2},{3,4}}'"],
    "text[]": ['\'{"",NULL,"null","a,\\"b\\\\\\\\"}\'', "ARRAY[E'\\n']"],
    "numeric(5,1)[]": ["'{1.5,NaN}'"],
    "timestamptz[]": ["'{2026-01-01 00:00+02,infinity}'"],
    "bytea[]": ["ARRAY['\\x00'::bytea]"],
    "mood": ["'glad'", "'so, \"so\"'"],
    "mood[]": ["ARRAY['glad', 'so, \"so\"', NULL]::mood[]"],
    "price": ["12.5", "'NaN'"],
    "cheap": ["7"],
    "address": ["ROW('a, \"b\"', 1, '2026-01-01')", "ROW(NULL, NULL, NULL)"],
    "address[]": ["ARRAY[ROW('x', 1, NULL)::address]"],
    "hstore": ["'a=>1, \"b c\"=>NULL'", "''"],
    "citext": ["'AbC'"],
    "ltree": ["'Top.Science.Astronomy'", "''"],
    "cube": ["'(1,2),(3,4)'"],
    "isbn": ["'978-0-393-04002-9'"],
}
HIDDEN = {field.name for field in HIDDEN_FIELDS} - {MARKS}


def contents(log: hr.Log, topic: str) -> dict[int, dict[str, Any]]:
    """The rows of a topic by id, without what differs between a snapshot and the stream. Values are
    their representations, since NaN is not equal to itself, and 0 is equal to -0.
    """
    return {
        row["id"]: {
            name: repr(value)
            for name, value in row.items()
            if name not in HIDDEN and name not in {"id", "_partition", "_offset", "_timestamp"}
        }
        for row in log.read(topic).to_pylist()
    }


def test_snapshot_and_stream_decode_every_type_alike(postgres: Postgres, address: str) -> None:
    existing = {name for (name,) in postgres.query("SELECT name FROM pg_available_extensions")}
    postgres.do(*(f"CREATE EXTENSION {name}" for name in EXTENSIONS if name in existing))
    postgres.do(
        "CREATE TYPE mood AS ENUM ('glad', 'so, \"so\"')",
        "CREATE DOMAIN price AS numeric(10,2)",
        "CREATE DOMAIN cheap AS price CHECK (VALUE < 10)",
        "CREATE TYPE address AS (street text, number int, since date)",
    )
    missing = {"hstore", "citext", "ltree", "cube"} - existing
    if "isn" not in existing:
        missing.add("isbn")
    types = {kind: values for kind, values in TYPES.items() if kind not in missing}
    columns = ", ".join(f"c{number} {kind}" for number, kind in enumerate(types))
    postgres.do(
        f"CREATE TABLE things (id int PRIMARY KEY, {columns},"
        " doubled bigint GENERATED ALWAYS AS (c1 * 2) STORED)"
    )
    variants = max(map(len, types.values())) + 1

    def insert(first: int) -> None:
        for variant in range(variants):
            chosen = [
                values[variant] if variant < len(values) else "NULL" for values in types.values()
            ]
            postgres.do(f"INSERT INTO things VALUES ({first + variant}, {', '.join(chosen)})")

    insert(0)
    capture = postgres_capture(postgres, tables=["things"], chunk_rows=3)
    caught_up(capture, address).close()
    insert(100)
    with caught_up(capture, address) as log:
        rows = contents(log, "things")
        for variant in range(variants):
            for name, value in rows[variant].items():
                kind = list(types)[int(name[1:])] if name[1:].isdigit() else name
                assert value == rows[100 + variant][name], (kind, variant)
        # What is text in the topic is the server's own text, but where a cast to text has another.
        fields = log.topic("things").arrow_schema
        text_columns = [
            name
            for name in rows[0]
            if name[1:].isdigit() and str(fields.field(name).type) == "string"
        ]
        assert len(text_columns) > 45
        connection = postgres.connect()
        with connection.cursor() as cursor:
            cursor.execute(
                "SET timezone = 'UTC'; SET intervalstyle = iso_8601; SET datestyle = ISO"
            )
            cursor.execute(
                f"SELECT id, {', '.join(f'{name}::text' for name in text_columns)} FROM things"
            )
            for number, *texts in cursor.fetchall():
                for name, text in zip(text_columns, texts, strict=True):
                    if not {"char", "inet"} & {*list(types)[int(name[1:])].split("(")}:
                        assert rows[number][name] == repr(text), (
                            list(types)[int(name[1:])],
                            number,
                        )
        connection.close()
        marked = [row[MARKS] for row in rows.values() if row[MARKS] != "None"]
        assert all('"text": ' in marks and "unchanged" not in marks for marks in marked)


KEYS = {
    "citext": ["'a'", "'B'", "'c'"],
    "bytea": ["'\\x00'", "'\\xff'", "'\\x00ff'", "''"],
    "numeric": ["1.50", "'NaN'", "-1e40", "'-Infinity'"],
    "double precision": ["'NaN'", "'-Infinity'", "0.1", "1e300"],
    "timestamptz": ["'2026-01-01 00:00+02'", "'1970-01-01'"],
    "inet": ["'10.0.0.1/8'", "'::1'"],
    "mood": ["'glad'", "'sad'"],
    "char(4)": ["'ab'", "''", "'ä'"],
    "int4range": ["'[1,5)'", "'empty'"],
    "text": ["''", "'a''b'", "E'\\n'", "'%s'", "'ä'", "'Z'"],
    "uuid": ["'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "'00000000-0000-0000-0000-000000000000'"],
    "interval": ["'1 month'", "'1 day'", "'1 year'"],
    "boolean": ["true", "false"],
}


def test_keys_of_every_type_are_read_in_chunks(postgres: Postgres, address: str) -> None:
    postgres.do("CREATE EXTENSION citext", "CREATE TYPE mood AS ENUM ('glad', 'sad')")
    for number, (kind, values) in enumerate(KEYS.items()):
        rows = ", ".join(f"({value}, {index})" for index, value in enumerate(values))
        postgres.do(
            f"CREATE TABLE k{number} (k {kind} PRIMARY KEY, n int)",
            f"INSERT INTO k{number} VALUES {rows}",
        )
    capture = postgres_capture(postgres, chunk_rows=1)
    caught_up(capture, address).close()
    postgres.do(*(f"UPDATE k{number} SET n = n + 10 WHERE n > 0" for number in range(len(KEYS))))
    with caught_up(capture, address) as log:
        for number, (kind, values) in enumerate(KEYS.items()):
            expected = [(0,), *((index + 10,) for index in range(1, len(values)))]
            assert folded_columns(log, f"k{number}", "n") == expected, kind


def test_a_row_of_more_than_8_mb_ended_the_snapshot(
    postgres: Postgres, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a chunk has fewer rows if they are large."""
    monkeypatch.setattr("headrace.cdc.postgres_source.chunks.MAX_CHUNK_BYTES", 100_000)
    postgres.do(
        "CREATE TABLE docs (id int PRIMARY KEY, doc text)",
        "INSERT INTO docs SELECT i, repeat('x', 50000) FROM generate_series(1, 6) i",
        "INSERT INTO docs VALUES (7, repeat('x', 9000000))",
    )
    with caught_up(postgres_capture(postgres), address) as log:
        lengths = sorted(
            (number, len(doc)) for number, doc in folded_columns(log, "docs", "id", "doc")
        )
        assert lengths == [*((number, 50_000) for number in range(1, 7)), (7, 9_000_000)]
