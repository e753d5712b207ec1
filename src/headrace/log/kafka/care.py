"""Looking after a log on Kafka: reading everything to see whether it can be read, and how much there is. The brokers do the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.errors import BadSchema, HeadraceError
from headrace.log.api import Finding, TopicInfo, TopicStats
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.fetching import Fetcher, OffsetLost
from headrace.log.kafka.reader import Range, ranges
from headrace.log.kafka.records import to_rows

UNKNOWN = -1


def verify(connection: Connection, topics: Sequence[str]) -> list[Finding]:
    """Every record that cannot be read: its checksum is wrong, or it does not fit the schema. Topics without a schema are left out."""
    findings: list[Finding] = []
    with Fetcher(connection.cluster, {"check.crcs": True}) as fetcher:
        for name in topics:
            try:
                info = connection.topics.info(name)
            except BadSchema:
                if len(topics) == 1:
                    raise
                continue
            for span in ranges(connection, info, None, None, None):
                findings += _verify_partition(fetcher, info, span)
    return findings


def _verify_partition(fetcher: Fetcher, info: TopicInfo, span: Range) -> Iterator[Finding]:
    partition, start, stop = span
    try:
        for messages in fetcher.records(info.name, partition, start, stop):
            for misfit in to_rows(info, messages).misfits:
                yield Finding("corrupt", f"{info.name}[{partition}]", UNKNOWN, misfit.reason, info.name, partition, misfit.offset)
    except OffsetLost:
        return  # retention was faster: what is gone needs no checking
    except HeadraceError as error:
        yield Finding("corrupt", f"{info.name}[{partition}]", UNKNOWN, error.message, info.name, partition)


def stats(connection: Connection, topics: Sequence[str]) -> list[TopicStats]:
    """Sizes. Kafka's client tells neither bytes nor segments (-1), and counts offsets, of which markers of transactions take some."""
    return [_topic_stats(connection, name) for name in topics]


def _topic_stats(connection: Connection, name: str) -> TopicStats:
    count = connection.broker.partitions(name) or connection.topics.info(name).partitions
    places = [(name, partition) for partition in range(count)]
    starts, ends = connection.broker.earliest(places), connection.broker.ends(places)
    rows = sum(ends[place] - starts[place] for place in places)
    earliest = {partition: starts[name, partition] for partition in range(count)}
    return TopicStats(name, count, rows, UNKNOWN, UNKNOWN, earliest, {partition: ends[name, partition] for partition in range(count)})
