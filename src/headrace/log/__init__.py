"""The log: durable, partitioned topics, from which everything else reads. Opened by `open_log`.

The modules, in the order in which a record meets them:

- `api`: the interface (`Log`, `Producer`, `Consumer`, …) that both backends implement
- `values`: what goes in and comes out (`AppendResult`, `Offsets`, `TopicInfo`, …)
- `topic_config`: checks of a topic's name, schema and settings
- `rows`: whatever a user appends, converted to the topic's Arrow schema or refused
- `partitioning`: the partition of each row
- `file/`: the embedded backend, a directory
- `kafka/`: the Kafka backend, a cluster
- `dead_letters`: rows that could not be used, and their replay
- `lag_watch`: a hook for groups that fall behind
- `spark/`: topics as Spark sources and sinks, and the Spark session

Schemas, types and the JSON codec are in `headrace.types`; pipelines over topics in
`headrace.pipeline`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.errors import LogUnavailable
from headrace.log.api import Log


def open_log(address: str | Path, **options: Any) -> Log:
    """Open a log by its address.

    Args:
        address: `file:PATH`, a directory that is created if it is missing, or `kafka://host:port`,
            the bootstrap server of a cluster.
        **options: For `file:`, `durability="os"` for speed instead of safety from power loss,
            `create=False` to refuse to create a new log, and `mode=0o660` to share a new one with
            the directory's group. For `kafka://`, librdkafka's
            configuration, TLS and SASL included.

    Returns:
        An open log. Close it, or use it in `with`.

    Raises:
        LogUnavailable: The address is not one of a log, or the log cannot be opened.
        NewerFormat: The log was written by a newer version of Headrace.
        MissingExtra: The package for Kafka is not installed.

    Example:
        ```python
        import headrace as hr

        with hr.open_log("file:data") as log:
            print(log.topics())
        ```
    """
    text = str(address)
    if text.startswith("kafka://"):
        from headrace.log.kafka.log import KafkaLog

        return KafkaLog.open(text, **options)
    if text.startswith("file:"):
        from headrace.log.file.log import FileLog

        return FileLog.open(text.removeprefix("file:"), **options)
    raise LogUnavailable(
        f"{text!r} is not the address of a log.",
        fix="use file:PATH, such as file:data, or kafka://host:port.",
    )


__all__ = ["Log", "open_log"]
