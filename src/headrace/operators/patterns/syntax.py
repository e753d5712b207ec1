"""A pattern as a tree: what `parsing` makes of its text, and `automaton` takes apart."""

from __future__ import annotations

from dataclasses import dataclass

STRICT, NEXT, ANY = 0, 1, 2
"""How a row follows the one before it: directly; as the next one that fits; as any later one that fits."""
CONTIGUITIES = {STRICT: "directly", NEXT: "skip till next", ANY: "skip till any"}


@dataclass(frozen=True)
class Link:
    """What lies before an element: how far its row may be from the one before, and which symbols no row in between may fit."""

    mode: int = STRICT
    absent: tuple[str, ...] = ()

    def then(self, other: Link) -> Link:
        """Both, one after the other, with nothing between them."""
        if other == DIRECTLY:
            return self
        return Link(max(self.mode, other.mode), tuple(dict.fromkeys((*self.absent, *other.absent))))


DIRECTLY = Link()


@dataclass(frozen=True)
class Symbol:
    """A row that fits a condition. `at`: where it stands in the text."""

    name: str
    at: int = 0


@dataclass(frozen=True)
class Sequence:
    """One after the other."""

    items: tuple[tuple[Link, Node], ...]


@dataclass(frozen=True)
class Either:
    """The first that fits."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """So many times: as often as possible, or (reluctant) as rarely."""

    node: Node
    least: int
    most: int | None
    greedy: bool = True
    at: int = 0


@dataclass(frozen=True)
class Permute:
    """All of them in any order; the order in which they are written comes first."""

    nodes: tuple[Node, ...]


Node = Symbol | Sequence | Either | Repeat | Permute


@dataclass(frozen=True)
class Pattern:
    """A whole pattern. `from_first`: it begins with the first row of its key. `absent`: symbols that no row may fit from its last row until its time is up; `alone`: no row at all."""

    text: str
    root: Node
    from_first: bool = False
    absent: tuple[str, ...] = ()
    alone: bool = False

    @property
    def waits(self) -> bool:
        """Whether it is known only when its time is up."""
        return bool(self.absent) or self.alone

    @property
    def symbols(self) -> tuple[str, ...]:
        """All names, in the order of the text."""
        found: dict[str, None] = {}
        _collect(self.root, found)
        return tuple(dict.fromkeys((*found, *self.absent)))

    @property
    def taken(self) -> tuple[str, ...]:
        """The names of symbols that rows of a match can have."""
        found: dict[str, None] = {}
        _collect(self.root, found, absent=False)
        return tuple(found)


def may_be_empty(node: Node) -> bool:
    """Whether a node fits no row at all."""
    if isinstance(node, Symbol):
        return False
    if isinstance(node, Repeat):
        return node.least == 0 or may_be_empty(node.node)
    if isinstance(node, Either):
        return any(may_be_empty(each) for each in node.options)
    return all(may_be_empty(each) for each in (node.nodes if isinstance(node, Permute) else (item for _, item in node.items)))


def _collect(node: Node, found: dict[str, None], *, absent: bool = True) -> None:
    if isinstance(node, Symbol):
        found[node.name] = None
    elif isinstance(node, Repeat):
        _collect(node.node, found, absent=absent)
    elif isinstance(node, Sequence):
        for link, item in node.items:
            found.update(dict.fromkeys(link.absent) if absent else {})
            _collect(item, found, absent=absent)
    else:
        for each in node.options if isinstance(node, Either) else node.nodes:
            _collect(each, found, absent=absent)
