"""From one database through the log into another: captured, and followed by a sink, they come to
the same, large values that an update did not touch included.
"""

from pathlib import Path

import pytest

import headrace as hr
from tests.cdc.conftest import Postgres

pytest.importorskip("psycopg")
TABLE = (
    "(id bigint PRIMARY KEY, title text, body text, tags text[], price numeric(12, 3), at"
    " timestamptz)"
)


@pytest.mark.parametrize(
    ("partitions", "batch_rows"),
    [pytest.param(1, 50_000, marks=pytest.mark.slow), (1, 1), (3, 50_000)],
)
def test_a_postgres_table_is_copied_and_stays_equal(
    postgres: Postgres, tmp_path: Path, partitions: int, batch_rows: int
) -> None:
    address = f"file:{tmp_path / 'log'}"
    large = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 3000) n)"
    insert = (
        f"INSERT INTO documents SELECT n, 'title ' || n, {large} || n, ARRAY['a', NULL, 'b\"c'], n"
        " / 8.0, now() FROM generate_series(1, 20) n"
    )
    postgres.do(
        f"CREATE TABLE documents {TABLE}",
        "ALTER TABLE documents ALTER body SET STORAGE EXTERNAL",
        insert,
        "CREATE SCHEMA copy",
    )
    capture = hr.cdc.postgres(
        postgres.url, tables=["documents"], log=address, partitions=partitions
    )
    sink = hr.sinks.postgres(postgres.url, table="copy.documents", batch_rows=batch_rows)

    def follow() -> None:
        capture.run(until_caught_up=True)
        sink.run(topic, log=address, until_caught_up=True)
        compared = sink.check(topic, log=address)
        assert compared.is_equal, compared.examples

    capture.run(until_caught_up=True)
    with hr.open_log(address) as log:
        (topic,) = [name for name in log.topics() if name.endswith("documents")]
    follow()
    assert len(postgres.query("SELECT id FROM copy.documents")) == 20
    postgres.do(
        "UPDATE documents SET title = 'new ' || id WHERE id % 2 = 0",
        "DELETE FROM documents WHERE id = 5",
        "UPDATE documents SET id = 100 WHERE id = 6",
    )
    postgres.do(
        "UPDATE documents SET id = 101 WHERE id = 7",
        "UPDATE documents SET id = 102 WHERE id = 101",
        "UPDATE documents SET title = 'moved' WHERE id = 102",
    )
    postgres.do(
        "UPDATE documents SET price = NULL WHERE id = 100",
        "UPDATE documents SET body = 'short' WHERE id = 8",
        "UPDATE documents SET title = 'x' WHERE id = 8",
    )
    follow()
    columns = "SELECT id, title, body, price, at FROM {}.documents ORDER BY id"
    assert postgres.query(columns.format("copy")) == postgres.query(columns.format("public"))
    assert postgres.query("SELECT count(*) FROM copy.documents WHERE length(body) > 90000") == [
        (18,)
    ]
