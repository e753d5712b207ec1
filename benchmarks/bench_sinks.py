"""Sinks: a million rows by key into Postgres against a bare COPY into an identical table, into
Redis against a bare pipelined HSET; a batch that the target has already; and into Iceberg and an
object store against Parquet files in a local directory.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.report import Result, Unavailable, compare, limited
from headrace.sinks.batch import build_batch
from headrace.sinks.checkpoint import new_owner
from headrace.sinks.declaration import Sink
from headrace.sinks.topic_follower import TopicFollower
from tests.servers.database_server import ServerUnavailable
from tests.servers.postgres_server import PostgresServer
from tests.servers.redis_server import RedisServer
from tests.servers.s3_server import S3Server

ROWS = 1_000_000
SCHEMA = "id BIGINT, customer BIGINT, status STRING, amount DOUBLE"
TABLE = "(id bigint PRIMARY KEY, customer bigint, status text, amount double precision)"
HSETS_A_PIPELINE = 10_000


def rows() -> pa.Table:
    numbers = np.random.default_rng(1).permutation(ROWS)
    status = pa.array(["placed", "paid", "sent", "returned"]).take(pa.array(numbers % 4))
    return pa.table(
        {"id": numbers, "customer": numbers % 5000, "status": status, "amount": numbers * 0.25}
    )


@contextmanager
def filled_log() -> Iterator[hr.Log]:
    with TemporaryDirectory() as directory, hr.open_log(f"file:{directory}/log") as log:
        log.create_table("orders", SCHEMA, key="id")
        with log.producer("orders") as producer:
            for batch in rows().to_batches(max_chunksize=100_000):
                producer.upsert(batch)
        yield log


def sink_rate(sink: Sink, log: hr.Log) -> float:
    """Rows a second, from the log into an empty target."""
    started = time.perf_counter()
    sink.run("orders", log=log.address, until_caught_up=True, start_over=True)
    return ROWS / (time.perf_counter() - started)


# Postgres


def execute(url: str, *statements: str) -> None:
    import psycopg

    with psycopg.connect(url) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def bare_copy_rate(url: str, file: Path) -> float:
    """The sink's rows as prepared text, in one COPY."""
    import psycopg

    execute(url, "DROP TABLE IF EXISTS bare", f"CREATE TABLE bare {TABLE}")
    text = file.read_bytes()
    started = time.perf_counter()
    with (
        psycopg.connect(url) as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY bare FROM STDIN (FORMAT csv)") as copy,
    ):
        copy.write(text)
    return ROWS / (time.perf_counter() - started)


def postgres_rate(url: str, log: hr.Log) -> float:
    execute(url, "DROP TABLE IF EXISTS orders")
    return sink_rate(hr.sinks.postgres(url), log)


def postgres_results(log: hr.Log, directory: Path) -> Iterator[Result]:
    from headrace.sinks.postgres_target import to_csv

    file = directory / "rows.csv"
    file.write_bytes(to_csv(rows()))
    with PostgresServer({"fsync": "on", "max_wal_size": "4GB"}) as server:
        yield compare(
            "sinks",
            "postgres, rows by key",
            "rows/s",
            ours=lambda: postgres_rate(server.url, log),
            peer="a bare COPY into an identical table",
            theirs=lambda: bare_copy_rate(server.url, file),
            bar=0.4,
            better="higher",
            repeats=3,
            warmups=1,
        )
        yield again(hr.sinks.postgres(server.url), log, "postgres")


def again(sink: Sink, log: hr.Log, kind: str) -> Result:
    """One batch, applied twice."""
    with sink.open(sink.shape_for(log.topic("orders")), log) as target:
        target.prepare()
        piece = TopicFollower(log, "orders", target.begin(new_owner(), start_over=True)).next(
            sink.batch_rows
        )
        assert piece is not None
        batch = build_batch(
            piece.rows,
            target.shape,
            piece.start,
            piece.stop,
            target.lookup,
            new_partitions=piece.new_partitions,
        )
        times = []
        for expected in (True, False):
            started = time.perf_counter()
            assert target.apply(batch, lambda _refused: None) is expected
            times.append(time.perf_counter() - started)
    return limited(
        "sinks",
        f"{kind}, the same batch again",
        "of the first time",
        times[1] / times[0],
        limit=0.05,
        params={"rows": batch.rows},
    )


# Redis


def bare_hset_rate(client: Any, listed: list[dict[str, Any]]) -> float:
    client.flushall()
    started = time.perf_counter()
    for start in range(0, ROWS, HSETS_A_PIPELINE):
        pipe = client.pipeline(transaction=False)
        for row in listed[start : start + HSETS_A_PIPELINE]:
            pipe.hset(f"orders:{row['id']}", mapping=row)
        pipe.execute()
    return ROWS / (time.perf_counter() - started)


def redis_rate(client: Any, sink: Sink, log: hr.Log) -> float:
    client.flushall()
    return sink_rate(sink, log)


def redis_results(log: hr.Log) -> Iterator[Result]:
    import redis

    listed = rows().to_pylist()
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        sink = hr.sinks.redis(server.url)
        yield compare(
            "sinks",
            "redis, rows by key",
            "rows/s",
            ours=lambda: redis_rate(client, sink, log),
            peer="a bare pipelined HSET",
            theirs=lambda: bare_hset_rate(client, listed),
            bar=0.5,
            better="higher",
            repeats=3,
            warmups=0,
        )
        client.flushall()
        yield again(sink, log, "redis")


# Files


def lake_results(log: hr.Log, directory: Path) -> Iterator[Result]:
    """Iceberg and Parquet in an object store against Parquet in a local directory."""
    local = hr.sinks.parquet(directory / "local")
    iceberg = hr.sinks.iceberg(
        "lake",
        properties={
            "type": "sql",
            "uri": f"sqlite:///{directory / 'catalog.db'}",
            "warehouse": f"file://{directory / 'warehouse'}",
        },
    )
    (directory / "warehouse").mkdir()
    with S3Server() as server:
        os.environ.update(server.environment)
        sinks = {"iceberg": iceberg, "parquet in S3": hr.sinks.parquet(server.new_bucket())}
        for kind, sink in sinks.items():
            yield compare(
                "sinks",
                f"{kind}, rows by key",
                "rows/s",
                ours=functools.partial(sink_rate, sink, log),
                peer="Parquet files in a local directory",
                theirs=functools.partial(sink_rate, local, log),
                bar=0.5,
                better="higher",
                repeats=3,
                warmups=0,
            )


def results() -> Iterator[Result]:
    try:
        with filled_log() as log, TemporaryDirectory() as directory:
            yield from postgres_results(log, Path(directory))
            yield from redis_results(log)
            yield from lake_results(log, Path(directory))
    except (ServerUnavailable, ImportError) as error:
        raise Unavailable(str(error)) from error
