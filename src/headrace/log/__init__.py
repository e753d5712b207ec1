"""The log: a durable, partitioned place where everything enters. `open_log` is the one door; see
`api` for what is behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.errors import LogUnavailable
from headrace.log.api import Log


def open_log(address: str | Path, **options: Any) -> Log:
    """Open a log by its address: `file:PATH` (a directory, made if it is missing) or
    `kafka://host:port`.

    Options of `file:`: `durability="os"` for speed instead of safety, `create=False` to refuse to
    make a new log. Options of `kafka://`: whatever librdkafka takes, TLS and SASL included.
    """
    text = str(address)
    if text.startswith("kafka://"):
        from headrace.log.kafka.log import KafkaLog

        return KafkaLog(text, **options)
    if text.startswith("file:"):
        from headrace.log.file.log import FileLog

        return FileLog(text.removeprefix("file:"), **options)
    raise LogUnavailable(
        f"{text!r} is not the address of a log.",
        fix="use file:PATH, such as file:data, or kafka://host:port.",
    )


__all__ = ["Log", "open_log"]
