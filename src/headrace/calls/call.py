"""A recorded call as it is declared, and the context that its function gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from headrace.log.values import calls_topic, requests_topic
from headrace.types.values import ColumnConverter, column_converter


@dataclass(frozen=True)
class RequestContext:
    """What the function of `Stream.call` gets as its second argument, if it takes one.

    Example:
        ```python
        async def charge(row, ctx):
            headers = {"Idempotency-Key": ctx.idempotency_key}
            return await ctx.client.charge(row["amount"], headers=headers)
        ```
    """

    idempotency_keys: tuple[str, ...]
    """For each row a text that is the same whenever the row is asked about, also after a crash."""
    attempt: int
    """1 for the first try of this run, and one more with each."""
    client: Any
    """What `client=` gave; None without it."""

    @property
    def idempotency_key(self) -> str:
        """The key of the row; of a batch, that of its first row."""
        return self.idempotency_keys[0]


Function = Callable[..., Any]
ClientFactory = Callable[[], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A declared call of a pipeline."""

    pipeline: str
    name: str
    function: Function
    client: ClientFactory | None
    schema: pa.Schema
    """The columns of an answer."""
    arguments: tuple[str, ...]
    """The columns of a row that the function gets."""
    code: str
    """The fingerprint or version of the function."""
    concurrency: int
    timeout_s: float
    retries: int
    max_per_second: float | None
    batch: int | None
    """How many rows the function gets at once; None for one row that is not in a list."""
    ordered: bool
    cache_us: int
    """How long an answer stands for equal arguments; 0 for no cache."""
    errors: str
    has_time: bool
    """Whether the rows have an event time."""

    @property
    def answers_topic(self) -> str:
        return calls_topic(self.pipeline, self.name)

    @property
    def requests_topic(self) -> str:
        return requests_topic(self.pipeline, self.name)

    @property
    def owner(self) -> str:
        """The id of the caller's transactions, and the name of its note."""
        return f"calls.{self.pipeline}.{self.name}"

    @cached_property
    def takes_context(self) -> bool:
        return takes_context(self.function)

    @cached_property
    def converters(self) -> tuple[ColumnConverter, ...]:
        return tuple(column_converter(field) for field in self.schema)


def takes_context(function: Function) -> bool:
    """Whether a function takes a context besides its row or rows."""
    parameters = inspect.signature(function).parameters.values()
    positional = [
        each
        for each in parameters
        if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}
    ]
    return len(positional) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)


def is_async(function: Any) -> bool:
    """Whether calling an object gives something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself is looked at
    )
