"""Pages of the guide that need a database: a real Postgres."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cdc.conftest import started
from tests.docs.pages import POSTGRES, pages, run_page
from tests.servers.postgres_server import PostgresServer


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    started(server)
    yield server
    server.stop()


@pytest.mark.parametrize("name", pages(server=POSTGRES))
def test_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: PostgresServer
) -> None:
    run_page(name, tmp_path, monkeypatch, {POSTGRES: postgres.url})
