"""Postgres tables whose keys move inside a transaction: chains, swaps and cycles, also where two
rows have one key for a moment.
"""

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.cdc.base import TableShape
from headrace.cdc.postgres_source.deferred_keys import settle
from headrace.columnar.columns import CHANGE_TYPE, DELETE, TRANSACTION
from headrace.errors import ConfigurationError
from tests.cdc.captures import caught_up, folded_columns, postgres_capture
from tests.cdc.conftest import Postgres

DEFERRABLE = (
    "CREATE TABLE t (id int, v text, n int DEFAULT 0, PRIMARY KEY (id) DEFERRABLE INITIALLY"
    " DEFERRED)"
)


@pytest.mark.parametrize("value", ["'v' || i", "'same'"])
def test_a_chain_of_key_changes_lost_rows(postgres: Postgres, address: str, value: str) -> None:
    """Rows that are equal but for their key, too: then nothing in the stream tells them apart."""
    postgres.do(
        DEFERRABLE,
        "ALTER TABLE t REPLICA IDENTITY FULL",
        f"INSERT INTO t SELECT i, {value} FROM generate_series(1, 50) i",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do("UPDATE t SET id = id + 1")
    postgres.do("UPDATE t SET id = id - 1 WHERE id > 1", "DELETE FROM t WHERE id = 20")
    postgres.do(
        "UPDATE t SET id = CASE id WHEN 3 THEN 4 WHEN 4 THEN 5 WHEN 5 THEN 3 ELSE id END",
        "UPDATE t SET id = 7 - id WHERE id IN (1, 6)",
    )
    postgres.do("INSERT INTO t VALUES (99, 'gone')", "DELETE FROM t WHERE id = 99")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", "v") == sorted(postgres.query("SELECT id, v FROM t"))


def test_a_chain_of_key_changes_over_many_parts_lost_rows(
    postgres: Postgres, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cdc.postgres_source.source.MAX_MESSAGES", 600)
    postgres.do(
        DEFERRABLE,
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i, 'v' || i % 3 FROM generate_series(1, 4000) i",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do("UPDATE t SET id = id + 1", "UPDATE t SET n = n + 1 WHERE id % 7 = 0")
    with caught_up(capture, address) as log:
        expected = sorted(postgres.query("SELECT id, v, n FROM t"))
        assert folded_columns(log, "t", "id", "v", "n") == expected


def test_keys_that_are_swapped_by_way_of_another_one(postgres: Postgres, address: str) -> None:
    """With an immediate key the order of the stream is right as it is."""
    postgres.do(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, 'v' || i FROM generate_series(9, 1, -1) i",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(
        "UPDATE t SET id = 0 WHERE id = 1",
        "UPDATE t SET id = 1 WHERE id = 2",
        "UPDATE t SET id = 2 WHERE id = 0",
        "UPDATE t SET id = id + 100",
        "UPDATE t SET id = id - 101 WHERE id < 104",
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", "v") == sorted(postgres.query("SELECT * FROM t"))


def test_a_published_table_with_a_deferrable_key_could_not_be_updated_any_more(
    postgres: Postgres, address: str
) -> None:
    postgres.do(DEFERRABLE, "INSERT INTO t VALUES (1, 'a')")
    with pytest.raises(ConfigurationError, match="ALTER TABLE public.t REPLICA IDENTITY FULL"):
        postgres_capture(postgres, tables=["t"]).run(log=address, until_caught_up=True)
    postgres.do("UPDATE t SET v = 'b'")


# The net effect of a transaction


SHAPE = TableShape("t", (("id", "BIGINT"), ("v", "STRING")), ("id",))


def test_random_transactions_settle_to_the_table_that_they_leave() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        before = {key: chance.choice("ab") for key in chance.sample(range(6), chance.randint(0, 6))}
        changes, after = _transaction(chance, before)
        rows = dict(before)
        for change in settle(_batch(changes), ("id",)).to_pylist():
            if change[CHANGE_TYPE] == DELETE:
                assert rows.pop(change["id"]) is not None, seed
            elif change[CHANGE_TYPE] != "update_preimage":
                rows[change["id"]] = change["v"]
        assert rows == after, (seed, before, changes)


Change = tuple[str, int, str]


def _transaction(
    chance: random.Random, before: dict[int, str]
) -> tuple[list[Change], dict[int, str]]:
    """Changes of one transaction whose keys are unique at its end, and the rows then."""
    while True:
        rows = list(before.items())
        changes: list[Change] = []
        for _ in range(chance.randint(1, 12)):
            kind = chance.choice(["insert", "delete", "update", "move"])
            if kind == "insert" or not rows:
                rows.append((chance.randrange(6), chance.choice("ab")))
                changes.append(("insert", *rows[-1]))
                continue
            old = rows.pop(chance.randrange(len(rows)))
            if kind == "delete":
                changes.append(("delete", *old))
            elif kind == "update":
                rows.append((old[0], chance.choice("ab")))
                changes += [("update_preimage", *old), ("update_postimage", *rows[-1])]
            else:
                rows.append(((old[0] + chance.randint(1, 5)) % 6, old[1]))
                changes += [("delete", *old), ("insert", *rows[-1])]
        if len({key for key, _ in rows}) == len(rows):
            return changes, dict(rows)


def _batch(changes: list[Change]) -> pa.RecordBatch:
    columns: dict[str, Any] = {
        "id": pa.array([key for _, key, _ in changes], pa.int64()),
        "v": pa.array([value for _, _, value in changes], pa.string()),
        TRANSACTION: pa.array(np.full(len(changes), 7)),
        CHANGE_TYPE: pa.array([kind for kind, _, _ in changes], pa.string()),
    }
    schema = SHAPE.batch_schema
    arrays = [columns.get(field.name, pa.nulls(len(changes), field.type)) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
