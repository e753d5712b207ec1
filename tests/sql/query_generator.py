"""Random queries that mean the same to us and to DuckDB, and random changes of the tables that they
read.

Every query has a key among its columns, so that it can be a view, and takes its rows from tables,
or from a stream that only inserts: what it comes to depends on the rows so far alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

STATEMENTS = """
    CREATE TOPIC e (id BIGINT, k INT, g STRING, v DOUBLE, happened TIMESTAMP)
        WITH (event_time = 'happened');
    CREATE TABLE t (id BIGINT PRIMARY KEY, k INT, g STRING, v DOUBLE);
    CREATE TABLE u (k INT PRIMARY KEY, name STRING, w DOUBLE)
"""
DUCKDB = """
    CREATE TABLE e (id BIGINT, k INT, g VARCHAR, v DOUBLE, happened TIMESTAMP);
    CREATE TABLE t (id BIGINT PRIMARY KEY, k INT, g VARCHAR, v DOUBLE);
    CREATE TABLE u (k INT PRIMARY KEY, name VARCHAR, w DOUBLE);
"""
COLUMNS = {"e": ("id", "k", "g", "v"), "t": ("id", "k", "g", "v"), "u": ("k", "name", "w")}
TEXTS = {"g", "name"}
WORDS = ("a", "b", "c", "d")


@dataclass
class Generator:
    """Draws queries and changes from a seed."""

    random: Random
    ids: set[int] = field(default_factory=set)
    names: set[int] = field(default_factory=set)
    next_event: int = 0

    # Changes

    def changes(self) -> tuple[dict[str, list[dict[str, Any]]], list[tuple[str, tuple[Any, ...]]]]:
        """The rows of one tick by topic, and the statements that change DuckDB's tables so."""
        draw = self.random
        rows: dict[str, list[dict[str, Any]]] = {"e": [], "t": [], "u": []}
        statements: list[tuple[str, tuple[Any, ...]]] = []
        for _ in range(draw.randint(0, 6)):
            event = {
                "id": self.next_event,
                "k": self.number(5),
                "g": self.word(),
                "v": self.number(20),
                "happened": f"2026-01-01T00:{self.next_event // 60:02}:{self.next_event % 60:02}Z",
            }
            self.next_event += 1
            rows["e"].append(event)
            at = str(event["happened"]).removesuffix("Z")
            statements.append(
                (
                    "INSERT INTO e VALUES (?, ?, ?, ?, ?)",
                    (event["id"], event["k"], event["g"], event["v"], at),
                )
            )
        for _ in range(draw.randint(0, 6)):
            key = draw.randint(0, 12)
            statements.append(("DELETE FROM t WHERE id = ?", (key,)))
            row: dict[str, Any] = {"id": key, "k": self.number(5), "g": self.word()}
            row["v"] = self.number(20)
            if key in self.ids and draw.random() < 0.3:
                self.ids.discard(key)
                rows["t"].append({**row, "_change_type": "delete"})
            else:
                self.ids.add(key)
                rows["t"].append({**row, "_change_type": "upsert"})
                statements.append(("INSERT INTO t VALUES (?, ?, ?, ?)", tuple(row.values())))
        for _ in range(draw.randint(0, 3)):
            key = draw.randint(0, 5)
            statements.append(("DELETE FROM u WHERE k = ?", (key,)))
            row = {"k": key, "name": self.word(), "w": self.number(9)}
            if key in self.names and draw.random() < 0.3:
                self.names.discard(key)
                rows["u"].append({**row, "_change_type": "delete"})
            else:
                self.names.add(key)
                rows["u"].append({**row, "_change_type": "upsert"})
                statements.append(("INSERT INTO u VALUES (?, ?, ?)", tuple(row.values())))
        return rows, statements

    def number(self, below: int) -> int | None:
        return None if self.random.random() < 0.15 else self.random.randrange(below)

    def word(self) -> str | None:
        return None if self.random.random() < 0.15 else self.random.choice(WORDS)

    # Queries

    def query(self) -> str:
        """A query."""
        kinds = [
            self.grouped,
            self.grouped,
            self.distinct,
            self.plain,
            self.joined,
            self.joined_groups,
            self.united,
            self.first_rows,
            self.first_of_all,
            self.semi_joined,
            self.nested,
            self.windows,
        ]
        return self.random.choice(kinds)()

    def rows(self) -> tuple[str, str, tuple[str, ...]]:
        """What stands in FROM, the name that qualifies its columns, and the columns."""
        table = self.random.choice(("e", "t", "u"))
        columns = COLUMNS[table]
        if self.random.random() < 0.3:
            inner = f"SELECT * FROM {table} WHERE {self.condition(columns)}"
            return f"({inner}) AS q", "q", columns
        if self.random.random() < 0.3:
            return f"{table} AS a", "a", columns
        return table, table, columns

    def value(self, columns: tuple[str, ...], table: str = "") -> str:
        """An expression over whole numbers."""
        prefix = f"{table}." if table and self.random.random() < 0.5 else ""
        if self.random.random() < 0.3:
            return prefix + next(name for name in columns if name in {"k", "id"})
        column = prefix + next(name for name in columns if name in {"v", "w"})
        return self.random.choice(
            [
                column,
                f"{column} + {self.random.randint(1, 5)}",
                f"{column} * {self.random.randint(2, 3)}.5",
                f"1 - {column}",
                f"CASE WHEN {self.condition(columns)} THEN {column} ELSE 0.5 END",
            ]
        )

    def condition(self, columns: tuple[str, ...], depth: int = 0) -> str:
        numbers = [name for name in columns if name not in TEXTS]
        texts = [name for name in columns if name in TEXTS]
        number, text = self.random.choice(numbers), self.random.choice(texts)
        simple = [
            (
                f"{number} {self.random.choice(['<', '>', '<=', '>=', '=', '<>'])}"
                f" {self.random.randint(0, 12)}"
            ),
            f"{text} = '{self.random.choice(WORDS)}'",
            f"{text} IN ('{self.random.choice(WORDS)}', '{self.random.choice(WORDS)}')",
            f"{number} BETWEEN {self.random.randint(0, 4)} AND {self.random.randint(3, 15)}",
            f"{self.random.choice([number, text])} IS {self.random.choice(['', 'NOT '])}NULL",
        ]
        if depth < 2 and self.random.random() < 0.4:
            a, b = self.condition(columns, depth + 1), self.condition(columns, depth + 1)
            return self.random.choice([f"{a} AND {b}", f"({a} OR {b})", f"NOT ({a})"])
        return self.random.choice(simple)

    def where(self, columns: tuple[str, ...]) -> str:
        return f" WHERE {self.condition(columns)}" if self.random.random() < 0.5 else ""

    def aggregates(self, columns: tuple[str, ...], table: str) -> str:
        calls = []
        for number in range(self.random.randint(1, 3)):
            value = self.value(columns, table)
            call = self.random.choice(
                [
                    "count(*)",
                    f"count({value})",
                    f"sum({value})",
                    f"min({value})",
                    f"max({value})",
                    f"avg({value})",
                    f"count(DISTINCT {value})",
                    f"sum({value}) + count(*)",
                ]
            )
            if self.random.random() < 0.2 and "+ count" not in call:
                call = f"{call} FILTER (WHERE {self.condition(columns)})"
            calls.append(f"{call} AS x{number}")
        return ", ".join(calls)

    def grouped(self) -> str:
        source, name, columns = self.rows()
        key = self.random.choice(columns)
        if self.random.random() < 0.3:
            key_text, key = f"{self.value(columns, name)} AS y", "y"
        else:
            key_text = key
        having = " HAVING count(*) > 1" if self.random.random() < 0.3 else ""
        return (
            f"SELECT {key_text}, {self.aggregates(columns, name)} FROM {source}"
            f"{self.where(columns)} GROUP BY {key}{having}"
        )

    def distinct(self) -> str:
        source, _, columns = self.rows()
        chosen = self.random.sample(columns, self.random.randint(1, 2))
        return f"SELECT DISTINCT {', '.join(chosen)} FROM {source}{self.where(columns)}"

    def plain(self) -> str:
        columns = COLUMNS["t"]
        return f"SELECT id, {self.value(columns)} AS x, g FROM t{self.where(columns)}"

    def join(self) -> str:
        kind = self.random.choice(["", "LEFT ", "RIGHT ", "FULL "])
        return f"t {kind}JOIN u ON t.k = u.k"

    def joined(self) -> str:
        kind = self.random.choice(["", "LEFT ", "FULL "])
        more = ""
        if not kind and self.random.random() < 0.5:
            more = " AND t.v > u.w"
        where = ""
        if self.random.random() < 0.5:
            where = self.random.choice(
                [" WHERE u.k IS NULL", " WHERE name = 'a'", " WHERE v + w > 5", " WHERE t.id > 3"]
            )
        return (
            f"SELECT id, {'k, ' if kind == 'FULL ' else ''}u.k AS uk, t.k AS tk, v, w, name FROM t"
            f" {kind}JOIN u{' USING (k)' if kind == 'FULL ' else f' ON t.k = u.k{more}'}{where}"
        )

    def joined_groups(self) -> str:
        key = self.random.choice(["name", "g", "t.k"])
        call = self.random.choice(["count(*)", "sum(v)", "max(w)", "count(u.k)", "sum(v * w)"])
        return f"SELECT {key}, {call} AS x FROM {self.join()} GROUP BY {key}"

    def united(self) -> str:
        a, b = self.random.sample(["t", "e", "t"], 2)
        columns = COLUMNS["t"]
        one = f"SELECT g, v FROM {a}{self.where(columns)}"
        other = f"SELECT name, w FROM u{self.where(COLUMNS['u'])}"
        if self.random.random() < 0.5:
            return f"{one} UNION {other}"
        inner = (
            f"SELECT id, g, v FROM t{self.where(columns)} UNION ALL"
            f" SELECT id, g, v FROM t{self.where(columns)}"
        )
        del b
        return f"SELECT g, count(*) AS n, sum(v) AS s FROM ({inner}) AS q GROUP BY g"

    def first_rows(self) -> str:
        table = "t"
        count = self.random.randint(1, 3)
        way = self.random.choice(["ASC", "DESC"])
        return (
            f"SELECT id, g, v FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY g ORDER BY v {way}"
            f" NULLS LAST, id) AS n FROM {table}{self.where(COLUMNS[table])}) AS q WHERE n <="
            f" {count}"
        )

    def first_of_all(self) -> str:
        way = self.random.choice(["ASC", "DESC"])
        return (
            f"SELECT id, v FROM t{self.where(COLUMNS['t'])} ORDER BY v {way} NULLS LAST, id"
            f" LIMIT {self.random.randint(1, 4)}"
        )

    def semi_joined(self) -> str:
        condition = self.condition(COLUMNS["u"])
        return self.random.choice(
            [
                f"SELECT * FROM t WHERE k IN (SELECT k FROM u WHERE {condition})",
                (
                    f"SELECT id, v FROM t WHERE v > 2 AND EXISTS (SELECT 1 FROM u WHERE u.k = t.k"
                    f" AND {condition.replace('k ', 'u.k ')})"
                ),
                "SELECT * FROM t WHERE NOT EXISTS (SELECT 1 FROM u WHERE u.k = t.k)",
                "SELECT * FROM u WHERE k IN (SELECT k FROM e)",
                "SELECT * FROM t WHERE NOT EXISTS (SELECT 1 FROM e WHERE e.k = t.k AND e.g = t.g)",
                "SELECT g, count(*) AS n FROM t WHERE g IN (SELECT name FROM u) GROUP BY g",
            ]
        )

    def nested(self) -> str:
        inner = (
            "WITH q AS (SELECT g, k, sum(v) AS s, count(*) AS n FROM"
            f" {self.random.choice(['t', 'e'])}{self.where(COLUMNS['t'])} GROUP BY g, k)"
        )
        return inner + self.random.choice(
            [
                " SELECT g, max(s) AS m, sum(n) AS n FROM q GROUP BY g",
                " SELECT n, count(*) AS groups FROM q GROUP BY n",
                " SELECT g, q.k, s, name FROM q LEFT JOIN u ON q.k = u.k",
                " SELECT DISTINCT n, s FROM q WHERE s > 3",
                (
                    " SELECT a.g, a.k, a.s + b.s AS s, b.g AS g2, b.k AS k2 FROM q AS a JOIN q AS b"
                    " ON a.n = b.n"
                ),
            ]
        )

    def windows(self) -> str:
        """Windows that are emitted on every change. DuckDB's text is `duckdb_text`'s."""
        aggregates = self.aggregates(COLUMNS["e"], "")
        key = self.random.choice(["g", "k"])
        return (
            f"SELECT {key}, window_start, window_end, {aggregates} FROM TUMBLE(e, happened,"
            f" INTERVAL '10' SECOND){self.where(COLUMNS['e'])} GROUP BY {key}, window_start,"
            " window_end EMIT CHANGES"
        )


def duckdb_text(query: str) -> str:
    """The query as DuckDB takes it: windows are columns of the rows there."""
    start = "time_bucket(INTERVAL '10 seconds', happened)"
    windows = f"(SELECT *, {start} AS window_start, {start} + INTERVAL '10 seconds' AS window_end"
    text = query.replace("TUMBLE(e, happened, INTERVAL '10' SECOND)", f"{windows} FROM e) AS e")
    return text.replace(" EMIT CHANGES", "")


def queries(seed: int, count: int) -> Iterator[str]:
    """So many queries of a seed."""
    generator = Generator(Random(seed))
    for _ in range(count):
        yield generator.query()
