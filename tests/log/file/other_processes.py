"""What other processes do to a log in the tests of several at once. Each function is the whole life
of a process.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

from headrace.log.file.log import FileLog

SCHEMA = "who INT, n BIGINT"


def started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that inherits nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.log.file.other_processes"])
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def append_from_threads(root: Path, first: int, threads: int, appends: int) -> None:
    """Each thread is a producer of its own; the log may not be there yet."""
    with FileLog.open(root) as log:
        log.create_topic("a", SCHEMA, partitions=2, exist_ok=True)
        workers = [
            Thread(target=append_in_turn, args=(log, first + n, appends)) for n in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def append_in_turn(log: FileLog, who: int, appends: int) -> None:
    producer = log.producer("a")
    for n in range(appends):
        producer.append({"who": who, "n": n}, partition=who % 2)


def poll_and_commit(root: Path, diary: Path) -> None:
    """A member of a group: notes what it owns, and each offset that it could commit."""
    with (
        FileLog.open(root) as log,
        log.consumer("a", "readers", session_timeout="1 second") as consumer,
    ):
        while True:
            consumer.poll("20 milliseconds", max_rows=5)
            consumer.commit()
            diary.write_text(repr(dict(consumer.positions())))


def poll_pause_and_commit(root: Path, diary: Path, go_on: Path) -> None:
    """A member that reads rows and commits them much later."""
    with (
        FileLog.open(root) as log,
        log.consumer("a", "readers", session_timeout="1 second") as consumer,
    ):
        consumer.poll("1 second", max_rows=5)
        diary.write_text("read")
        while not go_on.exists():
            time.sleep(0.01)
        try:
            consumer.commit()
            diary.write_text("committed")
        except Exception as error:
            diary.write_text(type(error).__name__)
