"""`hr.spark()`: a Spark session set up for topics. Without arguments it starts a local Spark; with
`master=` or `remote=` it uses a cluster.

Every setting can be overridden, by `config={"spark.sql.shuffle.partitions": 8}` or by keyword with
underscores for dots: `sql_shuffle_partitions=8`. If a session is running already, it is returned,
with the source registered and those options that can still be changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pyspark.core.context import SparkContext
from pyspark.sql import SparkSession

from headrace.log.spark import register
from headrace.log.spark.jvm import HIDE_DEFAULT_SOURCE, check_java
from headrace.log.spark.launcher import gateway_for, given_to_pyspark
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
