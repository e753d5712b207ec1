"""Which JVM a session uses: the one that a command has begun to start, or a new one, or PySpark's
own.

`begin` starts the JVM early, while the process imports and checks the rest; `gateway_for` waits for
it, or for another one if the settings, the environment or the directory have changed since. If a
JVM with a class-data archive does not start, the archive is removed and the JVM started without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

from headrace.log.spark.class_archive import find_archive, make_later, with_archive
from headrace.log.spark.jvm import Jvm, JvmCommand, JvmGateway, launch, usual_command
from headrace.log.spark.settings import chosen_settings, classic_settings

_lock = RLock()
_jvm: Jvm | None = None
"""The JVM that was started last, and the settings of its session."""


def begin(
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Start the JVM that `hr.spark` with the same options will use, and return at once. What is
    wrong with the options is left to `hr.spark` to report. In a process that has a JVM already,
    nothing happens.
    """
    pyspark: Any = sys.modules.get("pyspark.core.context")
    has_jvm = pyspark is not None and pyspark.SparkContext._gateway is not None  # noqa: SLF001
    if remote is None and not has_jvm:
        _start(classic_settings(master, chosen_settings(config, options)))


def gateway_for(settings: Mapping[str, Any]) -> JvmGateway | None:
    """The gateway of a JVM for a session with these settings; None if PySpark must start it."""
    with _lock:
        jvm = _start(settings)
        if jvm is None:
            return None
        gateway = jvm.wait_for_gateway()
        if gateway is None and (archive := find_archive(jvm.command)) is not None:
            archive.unlink(missing_ok=True)
            jvm = _start(settings)
            gateway = jvm.wait_for_gateway() if jvm is not None else None
        return gateway


def _start(settings: Mapping[str, Any]) -> Jvm | None:
    """The running JVM if it was started for these settings, otherwise a new one."""
    global _jvm  # noqa: PLW0603 - a process has one JVM
    with _lock:
        command = usual_command(settings)
        if _jvm is not None and not (_jvm.is_alive and _jvm.command == command):
            _jvm.close()
            _jvm = None
        if _jvm is None and command is not None:
            _jvm = launch(command, with_archive(command).arguments)
        return _jvm


@contextmanager
def given_to_pyspark(gateway: JvmGateway | None) -> Iterator[None]:
    """Let PySpark use a running JVM, as if `spark-submit` had started both."""
    if gateway is None:
        yield
        return
    os.environ["PYSPARK_GATEWAY_PORT"] = str(gateway.port)
    os.environ["PYSPARK_GATEWAY_SECRET"] = gateway.secret
    try:
        yield
    finally:
        del os.environ["PYSPARK_GATEWAY_PORT"], os.environ["PYSPARK_GATEWAY_SECRET"]


def discard() -> None:
    """End the JVM that was started here, if there is one."""
    global _jvm  # noqa: PLW0603
    with _lock:
        if _jvm is not None:
            _jvm.close()
            _jvm = None


def archive_later() -> None:
    """Have the class-data archive of this process's JVM made, if it is missing. For the end of a
    command.
    """
    command: JvmCommand | None = _jvm.command if _jvm is not None else None
    make_later(command)
