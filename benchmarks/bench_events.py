"""Event sourcing: durable commands a second and loading one entity, against the `eventsourcing`
library on an SQLite file and on Postgres, with the same commands; and rebuilding a projection.

Every command loads an account, decides a deposit and stores its event durably: one sync a command
with one writer, shared syncs with sixteen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa

import headrace as hr
from benchmarks import state_runs
from benchmarks.report import Result, Unavailable, compare, judged, within
from headrace.events import ANY, Change, Decider, Event, EventStore, Handler, open_store
from headrace.events.event import ARROW
from headrace.runtime.runner import Runner
from tests.servers.database_server import ServerUnavailable
from tests.servers.postgres_server import PostgresServer

if TYPE_CHECKING:
    from benchmarks.events_peer import Bank

COMMANDS, ACCOUNTS, WRITERS = 1500, 100, 16
EVENTS, OF_ONE = 1_000_000, 1_000
PROJECTED = 2_000_000
DURABLE = {
    "fsync": "on",
    "wal_level": "replica",
    "max_connections": "60",
    "shared_buffers": "256MB",
    "autovacuum": "on",
}
Run = Callable[[Callable[[int], object]], float]


@dataclass(frozen=True)
class Deposited:
    amount: int


@dataclass(frozen=True)
class Account:
    balance: int = 0


DECIDER = Decider(
    "account",
    Account(),
    lambda command, _account: [Deposited(command)],
    lambda account, event: replace(account, balance=account.balance + event.amount),
    (Deposited,),
)


def one_writer(command: Callable[[int], object]) -> float:
    started = time.perf_counter()
    for number in range(COMMANDS):
        command(number % ACCOUNTS)
    return COMMANDS / (time.perf_counter() - started)


def many_writers(command: Callable[[int], object]) -> float:
    """Each has entities of its own."""

    def write(writer: int) -> None:
        for number in range(COMMANDS // WRITERS):
            command(writer + WRITERS * (number % 4))

    started = time.perf_counter()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))
    return COMMANDS // WRITERS * WRITERS / (time.perf_counter() - started)


@contextmanager
def our_store() -> Iterator[EventStore]:
    with (
        TemporaryDirectory() as directory,
        hr.open_log(f"file:{directory}/log") as log,
        open_store(log, "bank") as store,
    ):
        yield store


def our_rate(run: Run) -> float:
    with our_store() as store:
        handler = Handler(store, DECIDER)
        return run(lambda account: handler.handle(f"account-{account}", 1))


def bank(**environment: str) -> Bank:
    """The accounts in the `eventsourcing` library."""
    try:
        from benchmarks.events_peer import Bank
    except ImportError as error:
        raise Unavailable(f"the eventsourcing library is not installed: {error}") from error
    return Bank(env=environment)


def their_rate(run: Run, **environment: str) -> float:
    with bank(**environment) as peer:
        accounts = peer.open(ACCOUNTS)
        return run(lambda number: peer.deposit(accounts[number % ACCOUNTS]))


def on_sqlite(run: Run) -> float:
    with TemporaryDirectory() as directory:
        return their_rate(
            run, PERSISTENCE_MODULE="eventsourcing.sqlite", SQLITE_DBNAME=f"{directory}/bank.db"
        )


def postgres_environment(server: PostgresServer) -> dict[str, str]:
    return {
        "PERSISTENCE_MODULE": "eventsourcing.postgres",
        "POSTGRES_DBNAME": "postgres",
        "POSTGRES_HOST": "127.0.0.1",
        "POSTGRES_PORT": str(server.port),
        "POSTGRES_USER": "postgres",
        "POSTGRES_PASSWORD": "none",
        "POSTGRES_MAX_OVERFLOW": "20",
    }


# Loading one of many


def fill_ours(store: EventStore) -> None:
    """One event of the account asked for among every thousand."""
    for number in range(OF_ONE):
        others = [Event("Deposited", {"amount": 1}) for _ in range(EVENTS // OF_ONE - 1)]
        store.commit(
            [
                Change(f"other-{number * 7 % 997}", others, ANY),
                Change("account-1", [Event("Deposited", {"amount": 1})], ANY),
            ]
        )


def fill_theirs(server: PostgresServer, peer: Bank) -> UUID:
    import psycopg

    one = peer.with_deposits(OF_ONE)
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO bank_events (originator_id, originator_version, topic, state) SELECT"
            " md5((g / 1000)::text)::uuid, g % 1000 + 1, topic, state FROM generate_series(0,"
            f" {EVENTS - OF_ONE - 1}) g, (SELECT topic, state FROM bank_events LIMIT 1) e"
        )
        connection.execute("VACUUM ANALYZE bank_events")
    return one


def load_ms(load: Callable[[], int]) -> float:
    started = time.perf_counter()
    assert load() == OF_ONE
    return (time.perf_counter() - started) * 1000


def loading(server: PostgresServer) -> Iterator[Result]:
    with bank(**postgres_environment(server)) as peer, our_store() as store:
        one = fill_theirs(server, peer)
        fill_ours(store)
        store.by_entity.flush()
        without = replace(DECIDER, snapshot_every=None)
        yield compare(
            "events",
            f"load an entity of {OF_ONE} events among {EVENTS}",
            "ms",
            ours=lambda: load_ms(lambda: Handler(store, without).state("account-1").balance),
            peer="eventsourcing on Postgres",
            theirs=lambda: load_ms(lambda: peer.version(one)),
            bar=3.0,
            better="lower",
            repeats=15,
        )
        Handler(store, replace(DECIDER, snapshot_every=1)).handle("account-1", 1)
        store.by_entity.flush()

        def with_snapshot() -> float:
            started = time.perf_counter()
            assert Handler(store, DECIDER).state("account-1").balance == OF_ONE + 1
            return (time.perf_counter() - started) * 1000

        yield within(
            "events",
            "load the same with a snapshot",
            "ms",
            ours=with_snapshot,
            limit=1.0,
            repeats=15,
        )


# A projection


def projection() -> hr.Pipeline:
    pipeline = hr.Pipeline("bench")
    amount = "CAST(get_json_object(data, '$.amount') AS BIGINT)"
    deposits = (
        hr.events.stream(pipeline, "bank")
        .where("type = 'Deposited'")
        .select("entity", amount=amount)
    )
    pipeline.view(
        "balances",
        deposits.group_by("entity").aggregate(balance=hr.agg.sum("amount"), n=hr.agg.count()),
    )
    return pipeline


def events_table(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    columns = {
        "entity": [f"account-{n % 50_000}" for n in numbers],
        "version": [n // 50_000 + 1 for n in numbers],
        "type": ["Deposited"] * count,
        "type_version": [1] * count,
        "id": [None] * count,
        "subject": [None] * count,
        "data": [json.dumps({"amount": n % 7}) for n in numbers],
        "state": [None] * count,
    }
    return pa.table(columns, schema=ARROW)


def projected_rate() -> float:
    """Events a second, from the first to the view that has them all."""
    with state_runs.session() as spark, state_runs.directory() as root:
        log = state_runs.new_log(root)
        open_store(log, "bank").close()
        for first in range(0, PROJECTED, 200_000):
            state_runs.append(log, events_table(first, 200_000), "bank")
        runner = Runner.start(projection().plan(), log, spark, root / "state")
        started = time.perf_counter()
        runner.cut(max_rows=PROJECTED)
        while runner.step():
            continue
        rate = PROJECTED / (time.perf_counter() - started)
        runner.close()
        log.close()
        return rate


def results() -> Iterator[Result]:
    yield compare(
        "events",
        "durable commands, one writer",
        "commands/s",
        ours=lambda: our_rate(one_writer),
        peer="eventsourcing on SQLite",
        theirs=lambda: on_sqlite(one_writer),
        bar=1.0,
        better="higher",
    )
    try:
        with PostgresServer(DURABLE) as server:
            environment = postgres_environment(server)
            yield compare(
                "events",
                f"durable commands, {WRITERS} writers",
                "commands/s",
                ours=lambda: our_rate(many_writers),
                peer="eventsourcing on Postgres",
                theirs=lambda: their_rate(many_writers, **environment),
                bar=3.0,
                better="higher",
            )
            yield from loading(server)
    except ServerUnavailable as why:
        raise Unavailable(str(why)) from why
    yield judged(
        "events",
        f"rebuild a projection of {PROJECTED} events",
        "events/s",
        projected_rate(),
        "limit",
        200_000,
        bar=1.0,
        better="higher",
    )
