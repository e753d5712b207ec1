"""Projections: views of events are pipelines over their topic, like any other. See
docs/concepts/event-sourcing.md for rebuilding one beside the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.events.event import SCHEMA

if TYPE_CHECKING:
    from headrace.pipeline.pipeline import Pipeline
    from headrace.pipeline.stream import Stream


def stream(pipeline: Pipeline, name: str) -> Stream:
    """An event store's events as a stream of a pipeline, in their global order: entity, version,
    type, type_version, id, subject, and `data` as JSON text.
    """
    return pipeline.topic(name, schema=SCHEMA, key="entity", partitions=1)
