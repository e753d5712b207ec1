"""The names of a pipeline as SQL sees them, and what SQL needs of a pipeline.

`headrace.pipeline.Pipeline` meets `SqlPipeline`; nothing here imports that class, so that imports
point one way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import UnknownTopic, nearest
from headrace.sql.problems import SqlRefusal

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.pipeline.stream import Stream, Table


class SqlPipeline(Protocol):
    """A pipeline that statements declare inputs and outputs of."""

    name: str
    log: str | None
    directory: Path
    captures: dict[str, Any]
    sinks: dict[str, Any]
    gateways: dict[str, Any]
    alerts: dict[str, Any]

    @property
    def topic(self) -> Callable[..., Stream]: ...

    @property
    def table(self) -> Callable[..., Table]: ...

    @property
    def view(self) -> Callable[..., Any]: ...

    @property
    def write(self) -> Callable[..., None]: ...

    @property
    def capture(self) -> Callable[..., Table]: ...

    @property
    def source(self) -> Callable[..., None]: ...

    @property
    def gateway(self) -> Callable[..., None]: ...

    @property
    def sink(self) -> Callable[..., None]: ...

    @property
    def alert(self) -> Callable[..., None]: ...

    @property
    def shed_policy(self) -> Callable[..., Any]: ...

    def plan(self) -> Any: ...

    def declared_rows(self) -> Mapping[str, Stream | Table]:
        """The rows of inputs and outputs, by name."""

    def plan_of(self, rows: Any) -> Any:
        """The plan of a pipeline whose only output is these rows."""

    def remove(self, kind: str, name: str) -> None:
        """Undo a declaration."""

    def declarations(self) -> dict[str, Any]:
        """Everything that was declared, for `restore`."""

    def restore(self, declarations: dict[str, Any]) -> None:
        """Undo everything that was declared since `declarations`."""


@dataclass
class DeclaredName:
    """What a statement has declared."""

    kind: str
    name: str
    text: str
    reads: frozenset[str] = frozenset()
    """The names that it reads, in lower case."""


@dataclass
class SqlCatalog:
    """The names that statements have declared, and those of the pipeline.

    Attributes:
        pipeline: The pipeline.
        named: Rows that have a name and are no output: temporary views.
        declared: What statements have declared, by name in lower case.
        broken: Names that statements with an error would have declared.
    """

    pipeline: SqlPipeline
    named: dict[str, Stream | Table] = field(default_factory=dict)
    declared: dict[str, DeclaredName] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)
    inserts: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    """The names that the statement at hand has read, in lower case."""

    def rows(self) -> dict[str, Stream | Table]:
        """All rows that a query can name."""
        return {**self.pipeline.declared_rows(), **self.named}

    def find(self, name: str, offset: int) -> Stream | Table:
        """The rows of a name: exactly, or in another case. Raises SqlRefusal if there are none."""
        rows = self.rows()
        actual = spelled(name, rows)
        if actual is not None:
            self.reads.add(actual.lower())
            return rows[actual]
        if name.lower() in self.broken:
            raise DependsOnError(offset, f"{name!r} was not declared.")
        raise SqlRefusal(
            offset,
            f"There is no topic, table or view {name!r}: {nearest(name, rows)}",
            "declare it before this statement: CREATE TOPIC, CREATE TABLE or CREATE VIEW.",
            UnknownTopic,
        )

    def state(self) -> dict[str, Any]:
        """Everything that statements have declared, for `restore`."""
        return {
            "pipeline": self.pipeline.declarations(),
            "named": dict(self.named),
            "declared": dict(self.declared),
            "functions": dict(self.functions),
            "inserts": {name: list(lists) for name, lists in self.inserts.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Undo everything that was declared since `state`."""
        self.pipeline.restore(state["pipeline"])
        for name in ("named", "declared", "functions", "inserts"):
            setattr(self, name, state[name])
        self.broken.clear()


class DependsOnError(SqlRefusal):
    """A statement reads a name that a statement with an error would have declared: it is not a
    problem of its own.
    """


def spelled(name: str, known: Iterable[str]) -> str | None:
    """A name as it was declared: exactly so, or the only one that differs in case alone."""
    known = list(known)
    if name in known:
        return name
    found = [each for each in known if each.lower() == name.lower()]
    return found[0] if len(found) == 1 else None
