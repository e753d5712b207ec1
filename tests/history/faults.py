"""Faults inside a process of a load: a wall clock that was set, and a full disk.

They are switched on and off by files in the load's directory: `clock-PART` holds the seconds by
which the clock of a process is off, and while `disk-full` is there, no file grows.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import headrace as hr
from headrace.log.file import committer, maintenance, producer, staging, transaction
from headrace.log.file import log as file_log
from headrace.testing.power_loss import FullDisk

DISK_FULL = "disk-full"
KAFKA_NEWEST_KEPT = 40
_NAME_BYTES = 512


def clock_file(directory: Path, part: str) -> Path:
    """The file that says by how much a process's wall clock is off, in seconds."""
    return directory / f"clock-{part}"


def install(directory: Path, part: str) -> None:
    """Put the switches into this process, and make the log's limits small, so that a small load
    meets them.
    """
    _install_clock(clock_file(directory, part))
    vars(file_log)["Disk"] = lambda: SwitchedDisk(directory / DISK_FULL)
    committer.INLINE_BYTES = 4_000
    producer.MAX_COMMIT_BYTES = 16_000
    transaction.MAX_BYTES_IN_MEMORY = 8_000
    staging.MAX_COPIED_BYTES = 8_000
    maintenance.CHECKPOINT_RECORDS = 500
    with suppress(ImportError):  # without the extra there is only the embedded log
        from headrace.log.kafka import producer as kafka_producer

        # How long a producer that is killed in the middle of an append holds up others.
        kafka_producer.APPEND_TIMEOUT_MS = 4_000


def _install_clock(path: Path) -> None:
    """Shift what Python says the time is. The file system's clock stays right."""
    real_time_ns = time.time_ns

    def shifted_time_ns() -> int:
        try:
            return real_time_ns() + int(float(path.read_text() or 0) * 1e9)
        except FileNotFoundError:
            return real_time_ns()

    vars(time)["time_ns"] = shifted_time_ns
    vars(time)["time"] = lambda: shifted_time_ns() / 1e9


class SwitchedDisk(FullDisk):
    """A disk that is full while a file is there. A write that does not fit is done in part."""

    def __init__(self, switch: Path) -> None:
        super().__init__(1 << 60, name_bytes=_NAME_BYTES)
        self._switch = switch

    def reserve(self, growth: int, size: int) -> int:
        if growth <= 0 or not self._switch.exists():
            return size
        return max(0, size - (growth + 1) // 2)


def remove_old_rows(log: hr.Log, topic: str) -> None:
    """What a broker's retention does, without waiting for segments of a megabyte to fill. The
    embedded log does it by itself.
    """
    if not log.address.startswith("kafka://"):
        return
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": log.address.removeprefix("kafka://")})
    limits = [
        TopicPartition(topic, partition, end - KAFKA_NEWEST_KEPT)
        for partition, end in log.end_offsets(topic).items()
        if end - log.start_offsets(topic)[partition] > 2 * KAFKA_NEWEST_KEPT
    ]
    if limits:
        for future in admin.delete_records(limits).values():
            future.result(timeout=20)
