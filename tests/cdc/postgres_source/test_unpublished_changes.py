"""Changes that a Postgres server does not send, because the table had another name meanwhile, or
somebody altered the capture's publication.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.cdc.capture import CaptureStatus
from headrace.cdc.postgres_source import catalogue as catalogue_module
from headrace.cdc.postgres_source.catalogue import FoundTables, PostgresCatalogue, _execute_ddl
from headrace.cdc.state import request_snapshot
from headrace.errors import ConfigurationError
from tests.cdc.captures import caught_up, folded_columns, postgres_capture, running
from tests.cdc.conftest import Postgres
from tests.waits import wait_until

CHANGES = "UPDATE {table} SET v = 'x' WHERE id = 1; DELETE FROM {table} WHERE id = 2"
EXPECTED = [(1, "x"), (3, "v3")]
ALL = "publish = 'insert, update, delete, truncate'"


@pytest.fixture
def items(postgres: Postgres) -> Postgres:
    postgres.do(
        "CREATE TABLE items (id int PRIMARY KEY, v text)",
        "INSERT INTO items SELECT n, 'v' || n FROM generate_series(1, 3) n",
    )
    return postgres


def publication(postgres: Postgres) -> str:
    query = (
        "SELECT pubname FROM pg_publication p JOIN pg_publication_tables t USING (pubname)"
        " WHERE t.tablename = 'items'"
    )
    ((name,),) = postgres.query(query)
    return f'"{name}"'


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize(
    "statements",
    [
        [
            "ALTER TABLE items RENAME TO other",
            CHANGES.format(table="other"),
            "ALTER TABLE other RENAME TO items",
        ],
        [
            "BEGIN; ALTER TABLE items RENAME TO other; "
            + CHANGES.format(table="other")
            + "; ALTER TABLE other RENAME TO items; COMMIT"
        ],
        [
            "CREATE SCHEMA elsewhere",
            "ALTER TABLE items SET SCHEMA elsewhere",
            CHANGES.format(table="elsewhere.items"),
            "ALTER TABLE elsewhere.items SET SCHEMA public",
        ],
    ],
    ids=["renamed", "in one transaction", "another schema"],
)
def test_changes_of_a_table_that_had_another_name_meanwhile_were_lost(
    items: Postgres, address: str, statements: list[str], is_running: bool
) -> None:
    """The stream had them under the other name."""
    capture = postgres_capture(items, tables=["items"])
    caught_up(capture, address).close()
    if is_running:
        with running(capture, address) as log:
            for statement in statements:
                items.do(statement)
            wait_until(lambda: folded_columns(log, "items", "id", "v") == EXPECTED, 60)
        return
    for statement in statements:
        items.do(statement)
    with caught_up(capture, address) as log:
        assert folded_columns(log, "items", "id", "v") == EXPECTED


@pytest.mark.parametrize("is_back", [False, True])
def test_a_table_that_was_renamed_between_two_queries_ended_the_capture(
    items: Postgres, address: str, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    """The catalogue had it under its name, and then the publication had not."""
    items.do("CREATE TABLE stays (id int PRIMARY KEY)")
    capture = postgres_capture(items, tables=["items", "stays"])
    caught_up(capture, address).close()
    real, looks = PostgresCatalogue.relations, list[int]()

    def relations(self: PostgresCatalogue, wanted: Sequence[str]) -> FoundTables:
        found = real(self, wanted)
        if not looks:
            items.do("ALTER TABLE items RENAME TO other", CHANGES.format(table="other"))
        looks.append(len(looks))
        return found

    monkeypatch.setattr(PostgresCatalogue, "relations", relations)
    if is_back:
        monkeypatch.setattr(catalogue_module, "_execute_ddl", _after(items, _execute_ddl))
    seen: list[CaptureStatus] = []
    with running(capture, address, seen) as log:
        if not is_back:
            wait_until(lambda: bool(seen) and "public.items" in seen[-1].stopped, 60)
            items.do("ALTER TABLE other RENAME TO items")
        items.do("INSERT INTO stays VALUES (1)")
        wait_until(lambda: folded_columns(log, "items", "id", "v") == EXPECTED, 60)
        wait_until(lambda: folded_columns(log, "stays", "id") == [(1,)], 60)


def _after(items: Postgres, real: Any) -> Any:
    """Return a function that renames the table back before it does what another one does."""

    def renaming(catalogue: PostgresCatalogue, command: str) -> None:
        if items.query("SELECT 1 FROM pg_class WHERE relname = 'other'"):
            items.do("ALTER TABLE other RENAME TO items")
        real(catalogue, command)

    return renaming


def test_changes_that_the_publication_left_out_were_lost(items: Postgres, address: str) -> None:
    """Somebody had altered what the capture's publication publishes."""
    capture = postgres_capture(items, tables=["items"])
    caught_up(capture, address).close()
    name = publication(items)
    items.do(f"ALTER PUBLICATION {name} SET (publish = 'insert')", CHANGES.format(table="items"))
    with pytest.raises(ConfigurationError, match=r"was altered[\s\S]*ALTER PUBLICATION"):
        caught_up(capture, address)
    items.do(f"ALTER PUBLICATION {name} SET ({ALL})")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "items", "id", "v") == EXPECTED


def test_changes_that_the_publication_left_out_for_a_while_were_lost(
    items: Postgres, address: str
) -> None:
    capture = postgres_capture(items, tables=["items"])
    caught_up(capture, address).close()
    name = publication(items)
    items.do(
        f"ALTER PUBLICATION {name} SET (publish = 'insert')",
        CHANGES.format(table="items"),
        f"ALTER PUBLICATION {name} SET ({ALL})",
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "items", "id", "v") == EXPECTED


@pytest.mark.parametrize("what", ["WHERE (id > 2)", "(id)"])
def test_rows_and_columns_that_somebody_took_out_of_the_publication_were_lost(
    items: Postgres, address: str, what: str
) -> None:
    """From then on the server left them out, without a word. The reason of a table that is stopped
    was that it had been dropped or renamed.
    """
    capture = postgres_capture(items, tables=["items"])
    caught_up(capture, address).close()
    name = publication(items)
    items.do(f"ALTER PUBLICATION {name} SET TABLE items {what}", CHANGES.format(table="items"))
    seen: list[CaptureStatus] = []
    capture.run(log=address, until_caught_up=True, on_status=seen.append)
    assert "condition or a list of columns" in seen[-1].stopped["public.items"]
    items.do(f"ALTER PUBLICATION {name} DROP TABLE items")
    with caught_up(capture, address) as log:
        request_snapshot(log, capture.name, ["items"])
    with caught_up(capture, address) as log:
        assert folded_columns(log, "items", "id", "v") == EXPECTED


def test_an_owner_that_is_another_loses_nothing(items: Postgres, address: str) -> None:
    capture = postgres_capture(items, tables=["items"])
    caught_up(capture, address).close()
    items.do("ALTER TABLE items OWNER TO CURRENT_USER", "INSERT INTO items VALUES (4, 'v4')")
    with caught_up(capture, address) as log:
        assert len(log.read("items").to_pylist()) == 4  # it was not read again
