"""`hr.spark()`: a Spark session set up for topics. Without arguments it starts a local Spark; with
`master=` or `remote=` it uses a cluster.

Every setting can be overridden, by `config={"spark.sql.shuffle.partitions": 8}` or by keyword with
underscores for dots: `sql_shuffle_partitions=8`. If a session is running already, it is returned,
with the source registered and those options that can still be changed.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from typing import Any

from py4j.protocol import Py4JError
from pyspark.core.context import SparkContext
from pyspark.sql import SparkSession

from headrace.log.spark import register
from headrace.log.spark.jvm import HIDE_DEFAULT_SOURCE, check_java
from headrace.log.spark.launcher import discard, gateway_for, given_to_pyspark
from headrace.log.spark.settings import (
    SUBMITTED,
    chosen_settings,
    classic_settings,
    connect_settings,
    default_master,
    setting_text,
)


def spark(
    app: str = "headrace",
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> SparkSession:
    """Start or get a Spark session that reads and writes topics with `format("headrace")`.

    Its Python workers use this interpreter, its time zone is UTC, its state store is RocksDB, and
    it logs errors only and has no UI. A running session is returned as it is, with those options
    that can still be changed.

    Args:
        app: the name of the application.
        master: the address of a cluster, or `local[2]` for two local threads; by default all cores
            of this machine, or what `spark-submit` has chosen.
        remote: the address of a Spark Connect server, instead of `master`.
        config: Spark settings by their full names.
        **options: Spark settings by keyword, without the prefix `spark.` and with underscores for
            dots.

    Returns:
        The session.

    Raises:
        ConfigurationError: Spark must be started here, and there is no Java that it can run on.

    Example:
        >>> session = hr.spark(master="local[2]", sql_shuffle_partitions=4)
        >>> session.read.format("headrace").options(log="file:data", topic="orders").load().show()
    """
    chosen = chosen_settings(config, options)
    check_start(master=master or chosen.get("spark.master"), remote=remote)
    settings = (
        connect_settings(remote, chosen) if remote is not None else classic_settings(master, chosen)
    )
    builder: Any = SparkSession.builder
    builder = builder.appName(app) if remote is None else builder.remote(remote)
    for name, value in settings.items():
        builder = builder.config(name, setting_text(value))
    starts_jvm = remote is None and SparkContext._gateway is None  # noqa: SLF001
    gateway = gateway_for(settings) if starts_jvm else None
    # A JVM that is started here hides the source that Spark would find by itself: that one could
    # not be replaced by the registered one.
    os.environ[HIDE_DEFAULT_SOURCE] = "1"
    try:
        with given_to_pyspark(gateway):
            session: SparkSession = builder.getOrCreate()
    finally:
        del os.environ[HIDE_DEFAULT_SOURCE]
    register(session)
    return session


def check_start(*, master: str | None = None, remote: str | None = None, **_options: Any) -> None:
    """ConfigurationError if `spark` with these options would have to start a JVM here and cannot. A
    session that is running, or a JVM that was started elsewhere, needs no Java here.
    """
    if remote is not None:
        starts_jvm = remote.startswith("local")
    else:
        starts_jvm = (
            SparkSession.getActiveSession() is None and (master or default_master()) != SUBMITTED
        )
    if starts_jvm:
        check_java()


# The end of a session that nobody has stopped


CONNECT_TIMEOUT_S = 10.0


def has_ended(session: Any) -> bool:
    """Whether a session can run no more jobs: its JVM has ended, or its context was stopped. A
    Connect server that does not answer for a while has ended too.
    """
    if isinstance(session, SparkSession):
        try:
            context = session.sparkContext._jsc  # noqa: SLF001
            return context is None or bool(context.sc().isStopped())
        except (Py4JError, OSError):
            return True
    if not type(session).__module__.startswith("pyspark.sql.connect."):
        return False
    answers: list[str] = []

    def ask() -> None:
        with suppress(Exception):
            answers.append(session.version)

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(CONNECT_TIMEOUT_S)
    return not answers


def limit_retries(session: Any) -> None:
    """Let a call to a Connect server that has gone fail after about 12 seconds instead of ten
    minutes, for a run that tries again itself.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session.client.set_retry_policies([DefaultPolicy(max_retries=6, max_backoff=4_000)])


def end_quietly(session: Any) -> None:
    """Keep PySpark's accumulator server and Py4J from printing stack traces when the JVM dies:
    `has_ended` says so in a sentence.
    """
    logging.getLogger().addFilter(_is_not_of_lost_jvm)
    server = getattr(getattr(session, "sparkContext", None), "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_request: None


def _is_not_of_lost_jvm(record: logging.LogRecord) -> bool:
    """Whether a record of the root logger is another one than Py4J's about a lost connection, which
    it raises as well.
    """
    is_py4j = record.module in {"java_gateway", "clientserver"}
    return not (is_py4j and record.getMessage() == "Exception while sending command.")


def forget_ended(session: SparkSession) -> None:
    """Remove a session that has ended from PySpark, and its JVM if there is one, so that `spark`
    starts another.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the JVM may have crashed
        with suppress(Py4JError, OSError):
            session.stop()
    gateway: Any = SparkContext._gateway  # noqa: SLF001
    SparkContext._gateway = None  # noqa: SLF001
    SparkContext._jvm = None  # noqa: SLF001
    SparkContext._active_spark_context = None  # noqa: SLF001
    SparkSession._instantiatedSession = None  # noqa: SLF001
    SparkSession._activeSession = None  # noqa: SLF001
    with suppress(Exception):
        gateway.shutdown()
    discard()
