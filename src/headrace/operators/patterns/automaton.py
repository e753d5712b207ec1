"""What may follow what: a pattern as numbered places, each with its symbol, and from each the ways
on, in the order in which they are tried.

A place is one occurrence of a symbol; `{3,}` has three. Built by way of states that take no row,
which are then left out: what remains is small and is walked quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from headrace.errors import BadPattern
from headrace.operators.patterns.parser import (
    CONTIGUITIES,
    DIRECTLY,
    STRICT,
    Either,
    Link,
    Node,
    Pattern,
    Permute,
    Repeat,
    Sequence,
    Symbol,
    pointed,
)

MAX_PLACES = 500
ACCEPT = -1


@dataclass(frozen=True)
class Edge:
    """A way from one place to another, or (ACCEPT) to the end."""

    to: int
    link: Link = DIRECTLY


@dataclass(frozen=True)
class Automaton:
    """`symbols`: of each place. `first`: where a match can begin, in order. `edges`: the ways from
    each place, in order.
    """

    pattern: Pattern
    symbols: tuple[str, ...]
    first: tuple[int, ...]
    edges: tuple[tuple[Edge, ...], ...]

    def __len__(self) -> int:
        return len(self.symbols)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Places that can be reached from each other, later ones first: what can be known of a
        place follows from those behind it.
        """
        return tuple(tuple(sorted(group)) for group in _components(self))

    @cached_property
    def before(self) -> dict[str, frozenset[str]]:
        """For each symbol those that a match can have before it, itself included if it can come
        again.
        """
        reach = [{edge.to for edge in each if edge.to != ACCEPT} for each in self.edges]
        changed = True
        while changed:
            changed = False
            for place, to in enumerate(reach):
                more = to.union(*(reach[each] for each in to)) if to else to
                changed, reach[place] = changed or len(more) > len(to), more
        found: dict[str, set[str]] = {name: set() for name in self.symbols}
        for place, to in enumerate(reach):
            for other in to:
                found[self.symbols[other]].add(self.symbols[place])
        return {name: frozenset(names) for name, names in found.items()}

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The symbols of which every match has a row."""
        return tuple(
            symbol
            for symbol in dict.fromkeys(self.symbols)
            if not self._reaches_end_without(symbol)
        )

    def _reaches_end_without(self, symbol: str) -> bool:
        left, seen = [place for place in self.first if self.symbols[place] != symbol], set[int]()
        while left:
            place = left.pop()
            if place == ACCEPT:
                return True
            if place not in seen:
                seen.add(place)
                left += [
                    edge.to
                    for edge in self.edges[place]
                    if edge.to == ACCEPT or self.symbols[edge.to] != symbol
                ]
        return False

    @cached_property
    def ways_to(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each place those from which it can be reached, and how directly it must follow."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.edges]
        for place, edges in enumerate(self.edges):
            for edge in edges:
                if edge.to != ACCEPT:
                    found[edge.to].append((place, edge.link.mode))
        return tuple(tuple(each) for each in found)

    @property
    def is_strict(self) -> bool:
        """Whether some row must directly follow another: then every row of a key matters."""
        return self.pattern.alone or any(
            edge.to != ACCEPT and edge.link.mode == STRICT for each in self.edges for edge in each
        )

    def drawn(self) -> list[str]:
        """For people: each place, and where it leads to."""
        names = self.names
        lines = [
            "begins with"  # noqa: ISC004
            f" {', '.join(names[place] for place in self.first)}{' at the first row of the key' if self.pattern.from_first else ''}"
        ]
        for place, each in enumerate(self.edges):
            lines.append(f"{names[place]} → {', '.join(self._way(edge) for edge in each)}")
        return lines

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Places by their symbols, numbered where one has several."""
        seen: dict[str, int] = {}
        found = []
        for name in self.symbols:
            seen[name] = seen.get(name, 0) + 1
            found.append(name if self.symbols.count(name) == 1 else f"{name}.{seen[name]}")
        return tuple(found)

    def _way(self, edge: Edge) -> str:
        if edge.to == ACCEPT:
            absent = " or ".join(self.pattern.absent) or ("any row" if self.pattern.alone else "")
            return f"done unless {absent} comes before the time is up" if absent else "done"
        how = [] if edge.link.mode == STRICT else [CONTIGUITIES[edge.link.mode]]
        how += [f"no {' or '.join(edge.link.absent)} between"] if edge.link.absent else []
        return self.names[edge.to] + (f" ({', '.join(how)})" if how else "")


def build(pattern: Pattern, *, where: str = "a pattern") -> Automaton:
    """The automaton of a pattern. BadPattern if it is too large, or if no row at all would be a
    match.
    """
    maker = _Maker(pattern, where)
    end = maker.state()
    begin = maker.state()
    maker.ways[begin].append((maker.made(pattern.root, end), DIRECTLY))
    first = maker.follow(begin, end)
    if any(edge.to == ACCEPT for edge in first):
        raise BadPattern(
            f"The step {where} has a pattern that nothing at all would match: every part of it may"
            f" be left out.\n{pointed(pattern.text, 0)}",
            fix="let at least one row be needed: a+ instead of a*.",
        )
    places = sorted(maker.places)
    number = {place: at for at, place in enumerate(places)}
    edges = tuple(
        tuple(Edge(number.get(edge.to, ACCEPT), edge.link) for edge in maker.follow(place, end))
        for place in places
    )
    begins = tuple(dict.fromkeys(number[edge.to] for edge in first))
    return Automaton(pattern, tuple(maker.places[place] for place in places), begins, edges)


@dataclass
class _Maker:
    """States in the making: those with a symbol take a row; from each, ways that take none, in
    order.
    """

    pattern: Pattern
    where: str
    ways: list[list[tuple[int, Link]]] = field(default_factory=list)
    places: dict[int, str] = field(default_factory=dict)

    def state(self) -> int:
        self.ways.append([])
        return len(self.ways) - 1

    def made(self, node: Node, end: int) -> int:
        """The state in which a node begins, if it leads to `end`."""
        if isinstance(node, Symbol):
            return self._symbol(node, end)
        if isinstance(node, Sequence):
            return self._sequence(node, end)
        if isinstance(node, Repeat):
            return self._repeat(node, end)
        begin = self.state()
        if isinstance(node, Either):
            self.ways[begin] += [(self.made(each, end), DIRECTLY) for each in node.options]
        else:
            self.ways[begin] += [
                (self._permuted(node, at, end), DIRECTLY) for at in range(len(node.nodes))
            ]
        return begin

    def _symbol(self, node: Symbol, end: int) -> int:
        if len(self.places) >= MAX_PLACES:
            raise BadPattern(
                f"The step {self.where} has a pattern of more than {MAX_PLACES} symbols, counting"
                f" repeated ones.\n{pointed(self.pattern.text, node.at)}",
                fix="repeat fewer times, or without an upper bound: a{3,}.",
            )
        place = self.state()
        self.places[place] = node.name
        self.ways[place].append((end, DIRECTLY))
        return place

    def _sequence(self, node: Sequence, end: int) -> int:
        """Made in the order of the text, so that places are numbered in it."""
        states = [self.state() for _ in node.items]
        for (link, item), state, following in zip(
            node.items, states, [*states[1:], end], strict=True
        ):
            self.ways[state].append((self.made(item, following), link))
        return states[0]

    def _permuted(self, node: Permute, at: int, end: int) -> int:
        rest = node.nodes[:at] + node.nodes[at + 1 :]
        following = end
        inner = self.state()
        begin = self.made(node.nodes[at], inner)
        if rest:
            following = self.made(Permute(rest), end) if len(rest) > 1 else self.made(rest[0], end)
        self.ways[inner].append((following, DIRECTLY))
        return begin

    def _repeat(self, node: Repeat, end: int) -> int:
        begin = self.state()
        here = begin
        for _ in range(node.least - 1 if node.most is None and node.least else node.least):
            following = self.state()
            self.ways[here].append((self.made(node.node, following), DIRECTLY))
            here = following
        if node.most is not None:
            for _ in range(node.most - node.least):
                following = self.state()
                self._choose(here, self.made(node.node, following), end, greedy=node.greedy)
                here = following
            self.ways[here].append((end, DIRECTLY))
        elif node.least:
            again = self.state()
            inner = self.made(node.node, again)
            self.ways[here].append((inner, DIRECTLY))
            self._choose(again, inner, end, greedy=node.greedy)
        else:
            self._choose(here, self.made(node.node, here), end, greedy=node.greedy)
        return begin

    def _choose(self, state: int, inner: int, end: int, *, greedy: bool) -> None:
        self.ways[state] += [(inner, DIRECTLY), (end, DIRECTLY)][:: 1 if greedy else -1]

    def follow(self, state: int, end: int) -> list[Edge]:
        """The places that can come directly behind a state, in the order in which they are
        tried.
        """
        found: dict[Edge, None] = {}
        seen: set[tuple[int, Link]] = set()
        left = [(to, link) for to, link in reversed(self.ways[state])]
        while left:
            here, link = left.pop()
            if (here, link) in seen:
                continue
            seen.add((here, link))
            if here == end:
                found[Edge(ACCEPT)] = None
            elif here in self.places:
                found[Edge(here, link)] = None
            else:
                left += [(to, link.then(more)) for to, more in reversed(self.ways[here])]
        return list(found)


def _components(automaton: Automaton) -> list[list[int]]:
    """Tarjan's strongly connected components: each comes after all that it leads to."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[list[int]] = []

    def visit(place: int) -> None:
        order[place] = low[place] = len(order)
        stack.append(place)
        for edge in automaton.edges[place]:
            if edge.to == ACCEPT:
                continue
            if edge.to not in order:
                visit(edge.to)
                low[place] = min(low[place], low[edge.to])
            elif edge.to in stack:
                low[place] = min(low[place], order[edge.to])
        if low[place] == order[place]:
            at = stack.index(place)
            found.append(stack[at:])
            del stack[at:]

    for place in range(len(automaton)):
        if place not in order:
            visit(place)
    return found
