"""A class-data archive for Spark's JVM: the classes that Spark loads when it starts and runs a
first job, parsed and verified once, and mapped into memory from then on. It halves the processor
time of a start.

The archive is in the user's cache directory (`$XDG_CACHE_HOME/headrace` or `~/.cache/headrace`),
named after Spark, Java, and a fingerprint of both installations; any change of them makes another
one. It is never in the way. Without an archive, with an unwritable directory or with a damaged
file, the JVM starts as if this module did not exist, and says nothing:

- the file's size is part of its name: a truncated file, which would crash the JVM, is not used
- the JVM verifies checksums (`VerifySharedSpaces`) and the class path, and ignores what does not
  fit
- a file appears under its name complete and synced, or not at all

`make_later` starts a process that makes a missing archive, at idle priority and detached: it runs
a few small jobs in a JVM of its own. Commands call it when they end, so that it does not compete
with their batches. `python -m headrace.log.spark.class_archive` makes it at once, as when an image
is built. `HEADRACE_CLASS_ARCHIVE=off` turns all this off.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headrace.log.spark.jvm import Installation, JvmCommand, launch, usual_command
from headrace.log.spark.settings import classic_settings

SWITCH = "HEADRACE_CLASS_ARCHIVE"
MAX_ARCHIVES = 3
PATIENCE_S = 600.0
IDLE = "--idle"


def with_archive(command: JvmCommand) -> JvmCommand:
    """The command, with the options that use the archive if there is one for it."""
    path = find_archive(command)
    if path is None:
        return command
    quiet = ["-Xlog:cds*=off"]
    if command.installation.java_version >= 24:
        quiet.append("-Xlog:aot*=off")
    return command.with_options(
        f"-XX:SharedArchiveFile={path}", "-XX:+VerifySharedSpaces", "-Xshare:auto", *quiet
    )


def find_archive(command: JvmCommand) -> Path | None:
    """The archive that fits a command, if there is one."""
    if not _is_wanted(command):
        return None
    with suppress(OSError):
        for path in cache_directory().glob(f"{_name(command.installation)}-*.jsa"):
            if path.stem.rpartition("-")[2] == str(path.stat().st_size):
                return path
    return None


def cache_directory() -> Path:
    """The directory of archives, which may not exist."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "headrace"


def make_later(command: JvmCommand | None) -> None:
    """Start a process that makes the archive for a command, if it is missing. Returns at once."""
    if command is None or not _is_wanted(command) or find_archive(command) is not None:
        return
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", "headrace.log.spark.class_archive", IDLE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _is_wanted(command: JvmCommand) -> bool:
    """Whether an archive can be used: not if it is turned off, if the user has chosen another one,
    or with a directory of files in the class path, for which Java makes none.
    """
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
        return False
    if any(
        option.startswith(("-Xshare", "-XX:SharedArchiveFile", "-XX:AOT"))
        for option in command.options
    ):
        return False
    configuration = command.installation.configuration
    return not (configuration.is_dir() and any(configuration.iterdir()))


def _name(installation: Installation) -> str:
    """The archive's name without its size. The fingerprint covers what the JVM compares: Java's
    build, and the path, size and time of every file in the class path.
    """
    digest = blake2b(installation.java_build.encode(), digest_size=6)
    digest.update(installation.class_path.encode())
    for entry in sorted(os.scandir(installation.jars), key=lambda entry: entry.name):
        status = entry.stat()
        digest.update(f"{entry.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return (
        f"spark-{installation.spark_version}-java-{installation.java_version}-{digest.hexdigest()}"
    )


# Making it, in a process of its own


def make(command: JvmCommand) -> Path | None:
    """Make the archive for a command, and return its path. None if another process is at it;
    OSError if it cannot be made.
    """
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with _only_one(directory) as is_first:
        if not is_first:
            return None
        if (existing := find_archive(command)) is not None:
            return existing
        scratch = directory / f".{_name(command.installation)}.new"
        for unfinished in directory.glob(".spark-*.new"):
            unfinished.unlink(missing_ok=True)
        try:
            _run_jobs(command.with_options(f"-XX:ArchiveClassesAtExit={scratch}", "-Xlog:cds*=off"))
            size = scratch.stat().st_size
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
            path = directory / f"{_name(command.installation)}-{size}.jsa"
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        _remove_old(directory)
        return path


@contextmanager
def _only_one(directory: Path) -> Iterator[bool]:
    with (directory / ".making").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _remove_old(directory: Path) -> None:
    archives = sorted(directory.glob("spark-*.jsa"), key=lambda path: path.stat().st_mtime)
    for path in archives[:-MAX_ARCHIVES]:
        path.unlink(missing_ok=True)


def _run_jobs(command: JvmCommand) -> None:
    """Run in a JVM of its own what a pipeline's first batches run, and wait for its orderly end."""
    from pyspark.sql import SparkSession

    jvm = launch(command, command.arguments)
    gateway = jvm.wait_for_gateway()
    if gateway is None:
        raise OSError("the JVM did not start")
    os.environ["PYSPARK_GATEWAY_PORT"] = str(gateway.port)
    os.environ["PYSPARK_GATEWAY_SECRET"] = gateway.secret
    session = SparkSession.builder.config(map=dict(command.settings)).getOrCreate()
    _jobs(session)
    session.stop()
    jvm.close(PATIENCE_S)
    if jvm.process.returncode != 0:
        raise OSError("the JVM did not end as it should")


def _jobs(session: Any) -> None:
    def same(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    def pairs(rows: Iterator[Any]) -> Iterator[Any]:
        for row in rows:
            yield (row % 2, b"blob")

    numbers = session.range(0, 10, 1, 2)
    mapped = numbers.mapInArrow(same, "id long")
    for frame in (
        mapped,
        mapped.union(numbers).repartition(2, "id").sortWithinPartitions("id"),
        mapped.groupBy("id").count(),
        numbers.selectExpr("id", "cast(id as string) AS text").filter("text <> '3'"),
    ):
        frame.collect()
    session.createDataFrame([(1, "a")], "n INT, t STRING").collect()
    context = session.sparkContext
    context.parallelize(range(4), 2).mapPartitions(pairs).partitionBy(2, int).collect()


def _yield_to_others() -> None:
    """Use only the processor time that nobody else wants."""
    with suppress(OSError):
        os.nice(19)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(arguments: Sequence[str] = ()) -> None:
    """Make the archive for the Spark and Java that this process would use."""
    if IDLE in arguments:
        _yield_to_others()
    # Few cores and little memory; what is archived does not depend on them.
    settings = classic_settings(
        "local[2]",
        {
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.ui.enabled": "false",
        },
    )
    command = usual_command(settings)
    if command is None or not _is_wanted(command):
        sys.exit("Spark is set up in a way for which no archive is made.")
    started_s = time.monotonic()
    try:
        path = make(command)
    except OSError as error:
        sys.exit(f"No archive could be made in {cache_directory()}: {error}.")
    sys.stdout.write(
        "Another process makes the archive.\n"
        if path is None
        else f"{path} ({time.monotonic() - started_s:.0f} s)\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
