"""Pages of the guide that need a database: a real Postgres."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing.database_server import ServerUnavailable
from headrace.testing.postgres_server import PostgresServer
from tests.docs.pages import POSTGRES, pages, run_page


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """Skips where no server can be had; with CI=true that is a failure."""
    server = PostgresServer()
    try:
        server.start()
    except ServerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs Postgres: {error}")
        pytest.skip(f"no Postgres: {error}")
    yield server
    server.stop()


@pytest.mark.parametrize("name", pages(server=POSTGRES))
def test_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: PostgresServer) -> None:
    run_page(name, tmp_path, monkeypatch, {POSTGRES: postgres.url})
