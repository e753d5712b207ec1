"""Projections: views of events are pipelines over their topic, like any other.

`docs/concepts/event-sourcing.md` shows how to rebuild one next to the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.events.event import SCHEMA

if TYPE_CHECKING:
    from headrace.pipeline.pipeline import Pipeline
    from headrace.pipeline.stream import Stream


def stream(pipeline: Pipeline, name: str) -> Stream:
    """Read an event store's events as a stream of a pipeline, in their global order.

    Args:
        pipeline: The pipeline.
        name: The event store's name.

    Returns:
        A stream with the columns entity, version, type, type_version, id, subject, and `data` as
        JSON text.

    Example:
        >>> opened = hr.events.stream(pipeline, "accounts").where("type = 'Opened'")

    """
    return pipeline.topic(name, schema=SCHEMA, key="entity", partitions=1)
