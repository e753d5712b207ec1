"""A server of views that speaks Postgres's protocol, over a store with one view of every type."""

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from headrace.serve.postgres.listener import PostgresOptions
from headrace.serve.requests import Limits
from headrace.serve.server import Server, start
from headrace.types.schema import parse_schema
from headrace.views.store import ViewStore
from tests.views.store_contract import COUNTS, changes, inserts, update

SALES = parse_schema(
    "region STRING, amount DOUBLE, price DECIMAL(10, 2), placed TIMESTAMP, local TIMESTAMP_NTZ,"
    " day DATE, clock TIME, tags ARRAY<STRING>, numbers ARRAY<INT>, ok BOOLEAN, raw BINARY,"
    " tiny TINYINT, small SMALLINT, n INT, big BIGINT, ratio FLOAT, took INTERVAL DAY TO SECOND,"
    " s STRUCT<a: INT, b: STRING>, m MAP<STRING, INT>"
)
AT = dt.datetime(2026, 7, 31, 12, 30, 0, 250_000, dt.UTC)
EU = (
    "eu",
    1.5,
    Decimal("100.00"),
    AT,
    AT.replace(tzinfo=None),
    dt.date(2026, 7, 31),
    dt.time(1, 2, 3),
    ["a b", 'say "hi"', "NULL", ""],
    [1, None, -3],
    True,
    b"\x00\xff",
    -1,
    300,
    7,
    1 << 62,
    0.5,
    dt.timedelta(days=1, seconds=2),
    {"a": 1, "b": "x"},
    [("k", 1)],
)
US = ("us", float("nan"), Decimal("-0.05"), *[None] * 16)
LIMITS = Limits(poll_s=0.01, slow_s=2.0, sql_s=20.0)


@dataclass
class Site:
    """A running server, and its store."""

    server: Server
    store: ViewStore
    tick: int

    @property
    def port(self) -> int:
        assert self.server.service.postgres is not None
        return self.server.service.postgres.port

    def dsn(self, user: str = "analyst", **more: Any) -> str:
        parts = {"host": "127.0.0.1", "port": self.port, "user": user, "dbname": "shop", **more}
        return " ".join(f"{name}={value}" for name, value in parts.items())

    def connect(self, **more: Any) -> "psycopg.Connection[tuple[Any, ...]]":
        return psycopg.connect(self.dsn(**more), autocommit=True, connect_timeout=20)

    def commit(self, view: str, rows: Callable[[int], pa.Table]) -> int:
        self.tick += 1
        self.store.commit(self.tick, 1, {view: rows(self.tick)})
        return self.tick

    def count_up(self, key: int, value: int, before: int | None = None) -> int:
        if before is None:
            return self.commit("counts", lambda tick: inserts(tick, (key, value)))
        return self.commit(
            "counts", lambda tick: changes(*update(tick, (key, before), (key, value)))
        )


Open = Callable[..., Site]


@pytest.fixture
def open_site(tmp_path: Path) -> Iterator[Open]:
    """Starts servers, with options, that end with the test."""
    sites: list[Site] = []

    def open_it(
        *,
        token: str | None = None,
        limits: Limits = LIMITS,
        max_changes: int = 10_000,
        **options: Any,
    ) -> Site:
        directory = tmp_path / f"shop{len(sites) or ''}.state"
        directory.mkdir()
        store = ViewStore.open(directory / "views.db", max_changes=max_changes)
        sites.append(make_site(store, directory, token, limits, PostgresOptions(port=0, **options)))
        return sites[-1]

    yield open_it
    for site in sites:
        site.server.stop()
        site.store.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that tests share. They change nothing but the view `counts`."""
    directory = tmp_path_factory.mktemp("shared") / "shop.state"
    directory.mkdir()
    store = ViewStore.open(directory / "views.db")
    opened = make_site(store, directory, None, LIMITS, PostgresOptions(port=0))
    yield opened
    opened.server.stop()
    store.close()


def make_site(
    store: ViewStore, directory: Path, token: str | None, limits: Limits, options: PostgresOptions
) -> Site:
    store.declare("sales", SALES, ("region",))
    store.declare("counts", COUNTS, ("k",))
    store.declare("secret", COUNTS, ("k",))
    store.commit(
        3,
        1,
        {
            "sales": inserts(3, EU, US, schema=SALES),
            "counts": inserts(3, *((k, k * 10) for k in range(100))),
            "secret": inserts(3, (1, 1)),
        },
    )
    server = start(directory, None, 0, token=token, limits=limits, postgres=options)
    return Site(server, store, 3)


@pytest.fixture
def db(site: Site) -> Iterator["psycopg.Connection[tuple[Any, ...]]"]:
    with site.connect() as connection:
        yield connection
