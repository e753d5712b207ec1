"""Projections: views of events are pipelines over their topic, like any other.

`docs/concepts/event-sourcing.md` shows how to rebuild one next to the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.events.event import FIRST_SCHEMA, SCHEMA

if TYPE_CHECKING:
    from headrace.pipeline.pipeline import Pipeline
    from headrace.pipeline.stream import Stream


def stream(pipeline: Pipeline, name: str, *, metadata: bool = False) -> Stream:
    """Read an event store's events as a stream of a pipeline, in their global order.

    Args:
        pipeline: The pipeline.
        name: The event store's name.
        metadata: Whether the stream has the columns correlation_id, causation_id and metadata too.

    Returns:
        A stream with the columns entity, version, type, type_version, id, subject, and `data` as
        JSON text.

    Example:
        >>> opened = hr.events.stream(pipeline, "accounts").where("type = 'Opened'")

    """
    schema = SCHEMA if metadata else FIRST_SCHEMA
    return pipeline.topic(name, schema=schema, key="entity", partitions=1)
