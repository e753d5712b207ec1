"""Views of all types against a second DuckDB and plain Python, at every tick. The oracle is loaded
from the rows of the changes, folded in Python: it shares neither the store nor its codecs, its
replica or its SQL with us.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from headrace.serve.time_travel import view_at
from headrace.types.schema import parse_schema
from headrace.views.sql import SqlLimits, run_query
from headrace.views.store import ViewStore
from tests.views.store_contract import changes

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
SCALARS: dict[str, list[Any]] = {
    "BOOLEAN": [True, False],
    "TINYINT": [-128, 0, 7],
    "SMALLINT": [-9, 10, 100],
    "INT": [-9, 10, 100, 2**31 - 1],
    "BIGINT": [-9, 9, 10, 100, 2**40],
    "FLOAT": [-1.5, 0.0, 2.0, 10.0, math.inf, math.nan],
    "DOUBLE": [-1e300, -1.5, 0.0, 2.0, 10.0, -math.inf, math.inf, math.nan],
    "DECIMAL(6, 2)": [Decimal(text) for text in ("-9.50", "9.50", "10.00", "100.00")],
    "DECIMAL(18, 3)": [Decimal(text) for text in ("-9.500", "9.500", "123456789012345.678")],
    "DECIMAL(38, 4)": [Decimal(text) for text in ("-9.5", "9.5", "100", f"{'9' * 33}.9999")],
    "STRING": ["", "a", "B", "10", "9", "é", "\U0001f600", "\uffff", "it's", "NULL"],
    "BINARY": [b"", b"\x00", b"a", b"\xff"],
    "DATE": [date(1969, 12, 31), date(2026, 1, 31), date(9999, 12, 31), date(1, 1, 1)],
    "TIMESTAMP": [AT, AT - timedelta(days=30_000), AT + timedelta(microseconds=1)],
    "TIMESTAMP_NTZ": [AT.replace(tzinfo=None), datetime(1969, 1, 1)],  # noqa: DTZ001
}
NESTED: dict[str, list[Any]] = {
    "ARRAY<DECIMAL(6, 2)>": [[], [Decimal("9.50"), None], [Decimal("100.00")]],
    "STRUCT<a: TIMESTAMP, b: STRING>": [{"a": AT, "b": "x"}, {"a": None, "b": None}],
    "MAP<STRING, BIGINT>": [[("a", 1)], []],
}
Key = tuple[Any, ...]
Rows = dict[Key, dict[str, Any]]


def comparable(value: Any) -> Any:
    """A value by which equal keys are equal: NaN is one value."""
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def place(value: Any) -> tuple[int, Any]:
    """The order of keys in look-ups: NaN after all numbers, null last, in BINARY first."""
    if value is None:
        return 2, b""
    if isinstance(value, float) and math.isnan(value):
        return 1, 0.0
    return 0, value.encode() if isinstance(value, str) else value


class Oracle:
    """What a view of random columns holds, tick by tick."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.key_types = chance.sample(list(SCALARS), chance.randrange(1, 3))
        others = chance.sample(list(SCALARS), 4) + chance.sample(list(NESTED), 1)
        self.types = [*self.key_types, *others]
        self.names = [f"c{index}" for index in range(len(self.types))]
        self.key = tuple(self.names[: len(self.key_types)])
        self.schema = parse_schema(
            ", ".join(f"{name} {kind}" for name, kind in zip(self.names, self.types, strict=True))
        )
        self.rows: Rows = {}
        self.past: dict[int, Rows] = {0: {}}

    def value(self, kind: str) -> Any:
        if self.chance.random() < 0.15:
            return None
        return self.chance.choice({**SCALARS, **NESTED}[kind])

    def step(self, tick: int) -> pa.Table:
        """Random changes of a tick, some of a key that has just changed."""
        listed = []
        for _ in range(self.chance.randrange(0, 12)):
            row = {
                name: self.value(kind) for name, kind in zip(self.names, self.types, strict=True)
            }
            key = tuple(comparable(row[name]) for name in self.key)
            before = self.rows.get(key)
            if before is None:
                listed.append((tick, "insert", tuple(row.values())))
                self.rows[key] = row
            elif self.chance.random() < 0.4:
                listed.append((tick, "delete", tuple(before.values())))
                del self.rows[key]
            else:
                row = {**row, **{name: before[name] for name in self.key}}
                listed.append((tick, "update_preimage", tuple(before.values())))
                listed.append((tick, "update_postimage", tuple(row.values())))
                self.rows[key] = row
        self.past[tick] = dict(self.rows)
        return changes(*listed, schema=self.schema)

    def table(self, tick: int) -> pa.Table:
        return pa.Table.from_pylist(list(self.past[tick].values()), self.schema)

    def in_order(self, tick: int) -> list[dict[str, Any]]:
        def order(row: dict[str, Any]) -> list[tuple[int, Any]]:
            places = []
            for name, kind in zip(self.key, self.key_types, strict=True):
                value = row[name]
                places.append((-1, b"") if value is None and kind == "BINARY" else place(value))
            return places

        ordered = sorted(self.past[tick].values(), key=order)
        rows: list[dict[str, Any]] = pa.Table.from_pylist(ordered, self.schema).to_pylist()
        return rows

    def queries(self) -> Iterator[str]:
        chance = self.chance
        kinds = dict(zip(self.names, self.types, strict=True))
        scalars = [name for name, kind in kinds.items() if kind in SCALARS]
        everything = ", ".join(scalars)
        for _ in range(2):
            one, other = chance.choice(scalars), chance.choice(scalars)
            kind = kinds[one]
            literal = chance.choice(SCALARS[kind])
            if not isinstance(literal, bytes):
                text = str(literal).replace("'", "''")
                comparison = chance.choice(["<", "<=", "=", "<>", ">=", ">"])
                yield f"SELECT * FROM v WHERE {one} {comparison} '{text}' ORDER BY {everything}"
            yield f"SELECT min({one}), max({one}), count({one}), count(DISTINCT {one}) FROM v"
            yield f"SELECT {other}, count(*), max({one}) FROM v GROUP BY {other} ORDER BY {other}"
            yield f"SELECT {one} FROM v ORDER BY {one} DESC, {everything}"
            yield (
                f"SELECT {one}, row_number() OVER (ORDER BY {everything}) AS r FROM v"
                f" ORDER BY r LIMIT {chance.randrange(5)}"
            )
            yield f"SELECT count(*) FROM v a JOIN v b ON a.{one} = b.{one}"
            if kind.startswith(("DECIMAL", "BIGINT", "INT", "SMALLINT")):
                yield f"SELECT sum(CAST({one} AS DECIMAL(38, 4))), avg({one}) FROM v"


def second_opinion(table: pa.Table, query: str) -> list[tuple[str, ...]]:
    with duckdb.connect(":memory:") as db:
        db.execute("SET TimeZone = 'UTC'")
        db.execute("SET default_null_order = 'nulls_first_on_asc_last_on_desc'")
        db.register("arrow", table)
        db.execute(
            "CREATE TABLE v AS SELECT * FROM arrow"
        )  # a scan of Arrow data loses NaN in joins
        return printed(db.execute(query).to_arrow_table())


def printed(table: pa.Table) -> list[tuple[str, ...]]:
    return [tuple(map(str, row.values())) for row in table.to_pylist()]


def same_rows(left: Any, right: Any) -> bool:
    return list(map(str, left)) == list(map(str, right))


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))]
)
def test_views_of_all_types_at_every_tick(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    oracle = Oracle(chance)
    asked: dict[int, dict[str, list[tuple[str, ...]]]] = {}
    with ViewStore.open(tmp_path / "views.db") as store:
        store.declare("v", oracle.schema, oracle.key)
        reader = store.reader
        for tick in range(1, 5):
            store.commit(tick, 1, {"v": oracle.step(tick)})
            table, asked[tick] = oracle.table(tick), {}
            for query in oracle.queries():
                asked[tick][query] = printed(reader.sql(query.replace("FROM v", 'FROM "v"')))
                assert asked[tick][query] == second_opinion(table, query), query
            # Look-ups of keys and ranges
            ordered = oracle.in_order(tick)
            assert same_rows(reader.table("v").to_pylist(), ordered)
            for row in ordered:
                assert str(reader.get("v", tuple(row[name] for name in oracle.key))) == str(row)
            for _ in range(4):
                if not ordered:
                    break
                at = chance.randrange(len(ordered))
                key = tuple(ordered[at][name] for name in oracle.key)
                assert same_rows(reader.scan("v", start=key).to_pylist(), ordered[at:])
                assert same_rows(reader.scan("v", stop=key).to_pylist(), ordered[:at])
                assert same_rows(
                    reader.scan("v", start=key, reverse=True).to_pylist(), ordered[at:][::-1]
                )
        # Earlier ticks: SQL, ranges and keys
        with reader.snapshot() as snap:
            info = snap.view("v")
            for tick, queries in asked.items():
                for query, answer in list(queries.items())[::5]:
                    past = run_query(store.path, query, limits=SqlLimits(), ticks={"v": tick})
                    assert printed(past.rows) == answer, query
                ordered = oracle.in_order(tick)
                arguments: dict[str, Any] = {"key": None, "max_rows": 1_000}
                everything = view_at(
                    snap, info, tick, start=(), stop=(), descending=False, **arguments
                )
                assert same_rows(everything.to_pylist(), ordered)
                if ordered:
                    at = chance.randrange(len(ordered))
                    key = tuple(ordered[at][name] for name in oracle.key)
                    first = view_at(
                        snap, info, tick, start=key, stop=(), descending=True, **arguments
                    )
                    assert same_rows(first.to_pylist(), ordered[at:][::-1])
                    before = view_at(
                        snap, info, tick, start=(), stop=key, descending=False, **arguments
                    )
                    assert same_rows(before.to_pylist(), ordered[:at])
