"""Where the boxes of a graph go: in columns from inputs to outputs, ordered within a column so that few arrows cross. Used by `svg`.

An arrow that spans several columns goes through a free place in each column between, so that it passes beside the boxes and not through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.pipeline.draw import Graph

_SWEEPS = 8


@dataclass(frozen=True)
class Layout:
    """Places by id: (column, row). `routes` are the ids an arrow goes through, from its start to its end."""

    columns: tuple[tuple[str, ...], ...]
    routes: tuple[tuple[str, ...], ...]


def layout(graph: Graph) -> Layout:
    depth = _depths([node.id for node in graph.nodes], graph.edges)
    columns: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in graph.nodes:
        columns[depth[node.id]].append(node.id)
    routes = [_route(start, end, depth, columns) for start, end in graph.edges]
    _untangle(columns, routes)
    return Layout(tuple(map(tuple, columns)), tuple(routes))


def _depths(ids: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """How many steps lie before each; `ids` come in topological order. An input stands just before the first that reads it."""
    depth = dict.fromkeys(ids, 0)
    for name in ids:
        depth[name] = max((depth[start] + 1 for start, end in edges if end == name), default=0)
    for name in ids:
        read_by = [depth[end] for start, end in edges if start == name]
        if read_by and not any(end == name for _, end in edges):
            depth[name] = min(read_by) - 1
    return depth


def _route(start: str, end: str, depth: dict[str, int], columns: list[list[str]]) -> tuple[str, ...]:
    between = [f"{start}>{end}:{column}" for column in range(depth[start] + 1, depth[end])]
    for column, name in enumerate(between, depth[start] + 1):
        columns[column].append(name)
    return (start, *between, end)


def _untangle(columns: list[list[str]], routes: Iterable[tuple[str, ...]]) -> None:
    """Sort each column by the mean place of its neighbours, to and fro."""
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    for route in routes:
        for start, end in pairwise(route):
            after.setdefault(start, []).append(end)
            before.setdefault(end, []).append(start)
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for position in range(1, len(columns)) if forward else range(len(columns) - 2, -1, -1):
            fixed = {name: row for row, name in enumerate(columns[position + (-1 if forward else 1)])}
            _sort(columns[position], fixed, before if forward else after)


def _sort(column: list[str], fixed: dict[str, int], neighbours: dict[str, list[str]]) -> None:
    own = {name: row for row, name in enumerate(column)}

    def mean(name: str) -> float:
        rows = [fixed[each] for each in neighbours.get(name, ()) if each in fixed]
        return sum(rows) / len(rows) if rows else own[name]

    column.sort(key=mean)
