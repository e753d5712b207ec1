"""The automaton of a pattern: numbered states, each of which takes a row of one symbol, and the
transitions between them, in the order in which they are tried.

A state is one occurrence of a symbol: `{3,}` has three. The pattern `a b+ (-> c)?` has the states

    0: a    transitions  -> 1 (directly)
    1: b    transitions  -> 1 (directly), -> 2 (skip till next), accept
    2: c    transitions  accept

and starts in state 0. The automaton is built by way of an NFA with epsilon transitions, which are
then removed: what remains is small and quick to run. The tree of a pattern comes from `parser.py`;
`walker.py` and `matcher.py` run the automaton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from headrace.errors import BadPattern
from headrace.operators.patterns.parser import (
    CONTIGUITIES,
    STRICT,
    STRICT_CONTIGUITY,
    Alternation,
    Concatenation,
    Contiguity,
    Node,
    Pattern,
    Permutation,
    Repetition,
    Symbol,
    excerpt_at,
)

MAX_STATES = 500
ACCEPT = -1
"""The target of a transition that completes a match."""


@dataclass(frozen=True)
class Transition:
    """A transition to another state, or to ACCEPT."""

    target: int
    contiguity: Contiguity = STRICT_CONTIGUITY


@dataclass(frozen=True)
class Automaton:
    """The states of a pattern by number: the symbol of each, and its transitions in the order in
    which they are tried. A match begins in one of the start states, tried in order, too.
    """

    pattern: Pattern
    symbols: tuple[str, ...]
    start_states: tuple[int, ...]
    transitions: tuple[tuple[Transition, ...], ...]
    is_excluded: tuple[bool, ...] = ()
    """The states whose rows are left out where all rows of matches are emitted."""
    may_be_empty: bool = False
    """Whether a row from which nothing else matches begins an empty match."""

    def __len__(self) -> int:
        return len(self.symbols)

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """The strongly connected components, each behind those that it leads to: what is known of a
        state follows from the states that it leads to.
        """
        return tuple(tuple(sorted(component)) for component in _components(self))

    @cached_property
    def symbols_before(self) -> dict[str, frozenset[str]]:
        """For each symbol the symbols that a match can have before it; the symbol itself is one of
        them if it can repeat.
        """
        reachable = [
            {transition.target for transition in transitions} - {ACCEPT}
            for transitions in self.transitions
        ]
        changed = True
        while changed:
            changed = False
            for state, targets in enumerate(reachable):
                more = targets.union(*(reachable[target] for target in targets))
                changed = changed or len(more) > len(targets)
                reachable[state] = more
        before: dict[str, set[str]] = {symbol: set() for symbol in self.symbols}
        for state, targets in enumerate(reachable):
            for target in targets:
                before[self.symbols[target]].add(self.symbols[state])
        return {symbol: frozenset(symbols) for symbol, symbols in before.items()}

    @cached_property
    def required_symbols(self) -> tuple[str, ...]:
        """The symbols of which every match has a row."""
        if self.may_be_empty:
            return ()
        return tuple(
            symbol for symbol in dict.fromkeys(self.symbols) if not self._accepts_without(symbol)
        )

    def _accepts_without(self, symbol: str) -> bool:
        pending = [state for state in self.start_states if self.symbols[state] != symbol]
        seen: set[int] = set()
        while pending:
            state = pending.pop()
            if state == ACCEPT:
                return True
            if state not in seen:
                seen.add(state)
                pending += [
                    transition.target
                    for transition in self.transitions[state]
                    if transition.target == ACCEPT or self.symbols[transition.target] != symbol
                ]
        return False

    @cached_property
    def predecessors(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each state the states that lead to it, and the mode of contiguity."""
        predecessors: list[list[tuple[int, int]]] = [[] for _ in self.transitions]
        for state, transitions in enumerate(self.transitions):
            for transition in transitions:
                if transition.target != ACCEPT:
                    predecessors[transition.target].append((state, transition.contiguity.mode))
        return tuple(tuple(states) for states in predecessors)

    @property
    def is_strict(self) -> bool:
        """Whether some row must directly follow another: then every row of a key matters."""
        return self.pattern.no_row_follows or any(
            transition.target != ACCEPT and transition.contiguity.mode == STRICT
            for transitions in self.transitions
            for transition in transitions
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The states by their symbols, numbered where a symbol has several."""
        seen: dict[str, int] = {}
        names = []
        for symbol in self.symbols:
            seen[symbol] = seen.get(symbol, 0) + 1
            is_unique = self.symbols.count(symbol) == 1
            names.append(symbol if is_unique else f"{symbol}.{seen[symbol]}")
        return tuple(names)

    def describe(self) -> list[str]:
        """Lines for people: each state, and where it leads to."""
        starts = ", ".join(self.names[state] for state in self.start_states)
        anchor = " at the first row of the key" if self.pattern.is_anchored else ""
        lines = [f"begins with {starts}{anchor}"]
        for name, transitions in zip(self.names, self.transitions, strict=True):
            targets = ", ".join(self._describe_target(transition) for transition in transitions)
            lines.append(f"{name} → {targets}")
        return lines

    def _describe_target(self, transition: Transition) -> str:
        pattern, contiguity = self.pattern, transition.contiguity
        if transition.target == ACCEPT:
            absent = " or ".join(pattern.absent_symbols)
            absent = absent or ("any row" if pattern.no_row_follows else "")
            return f"done unless {absent} comes before the time is up" if absent else "done"
        how = [] if contiguity.mode == STRICT else [CONTIGUITIES[contiguity.mode]]
        if contiguity.absent_symbols:
            how.append(f"no {' or '.join(contiguity.absent_symbols)} between")
        return self.names[transition.target] + (f" ({', '.join(how)})" if how else "")


def build_automaton(pattern: Pattern, *, where: str = "a pattern") -> Automaton:
    """Build the automaton of a pattern.

    What would be tried after the empty match is never tried: it always fits.

    Raises:
        BadPattern: the pattern is too large, or prefers to match no row at all.
    """
    nfa = _EpsilonNfa(pattern, where)
    end = nfa.add_state()
    begin = nfa.add_state()
    nfa.epsilons[begin].append((nfa.add_node(pattern.root, end), STRICT_CONTIGUITY))
    starts = nfa.closure(begin, end)
    targets = [transition.target for transition in starts]
    may_be_empty = ACCEPT in targets
    targets = targets[: targets.index(ACCEPT)] if may_be_empty else targets
    if not targets:
        raise BadPattern(
            f"The step {where} has a pattern that prefers to match nothing at all, which fits every"
            f" row.\n{excerpt_at(pattern.text, 0)}",
            fix="let at least one row be needed, as in a+?, or let it match as many as it can: a*.",
        )
    states = sorted(nfa.symbols)
    numbers = {state: number for number, state in enumerate(states)}
    return Automaton(
        pattern=pattern,
        symbols=tuple(nfa.symbols[state] for state in states),
        start_states=tuple(dict.fromkeys(numbers[target] for target in targets)),
        transitions=tuple(
            tuple(
                Transition(numbers.get(transition.target, ACCEPT), transition.contiguity)
                for transition in nfa.closure(state, end)
            )
            for state in states
        ),
        is_excluded=tuple(state in nfa.excluded for state in states),
        may_be_empty=may_be_empty,
    )


@dataclass
class _EpsilonNfa:
    """An NFA under construction. States with a symbol take a row; every state has epsilon
    transitions, which take none, in the order in which they are tried.
    """

    pattern: Pattern
    where: str
    epsilons: list[list[tuple[int, Contiguity]]] = field(default_factory=list)
    symbols: dict[int, str] = field(default_factory=dict)
    excluded: set[int] = field(default_factory=set)

    def add_state(self) -> int:
        self.epsilons.append([])
        return len(self.epsilons) - 1

    def add_node(self, node: Node, end: int) -> int:
        """Add a node of the pattern that leads to `end`; return the state in which it begins."""
        if isinstance(node, Symbol):
            if len(self.symbols) >= MAX_STATES:
                raise BadPattern(
                    f"The step {self.where} has a pattern of more than {MAX_STATES} symbols,"
                    f" counting repeated ones.\n{excerpt_at(self.pattern.text, node.position)}",
                    fix="repeat fewer times, or without an upper bound: a{3,}.",
                )
            state = self.add_state()
            self.symbols[state] = node.name
            if node.is_excluded:
                self.excluded.add(state)
            self.epsilons[state].append((end, STRICT_CONTIGUITY))
            return state
        if isinstance(node, Concatenation):
            # Items are added in the order of the text, so that states are numbered in it.
            states = [self.add_state() for _ in node.items]
            for (contiguity, item), state, following in zip(
                node.items, states, [*states[1:], end], strict=True
            ):
                self.epsilons[state].append((self.add_node(item, following), contiguity))
            return states[0]
        if isinstance(node, Repetition):
            return self._add_repetition(node, end)
        begin = self.add_state()
        if isinstance(node, Alternation):
            starts = [self.add_node(option, end) for option in node.options]
        else:
            starts = [self._add_permutation(node, index, end) for index in range(len(node.nodes))]
        self.epsilons[begin] += [(start, STRICT_CONTIGUITY) for start in starts]
        return begin

    def _add_permutation(self, node: Permutation, index: int, end: int) -> int:
        """The permutations that begin with one of the nodes."""
        rest = node.nodes[:index] + node.nodes[index + 1 :]
        following = end
        middle = self.add_state()
        begin = self.add_node(node.nodes[index], middle)
        if rest:
            remaining = Permutation(rest) if len(rest) > 1 else rest[0]
            following = self.add_node(remaining, end)
        self.epsilons[middle].append((following, STRICT_CONTIGUITY))
        return begin

    def _add_repetition(self, node: Repetition, end: int) -> int:
        begin = current = self.add_state()
        is_open = node.max_count is None
        # The required repetitions; the last one of an open repetition is the loop.
        for _ in range(node.min_count - 1 if is_open and node.min_count else node.min_count):
            following = self.add_state()
            self.epsilons[current].append((self.add_node(node.node, following), STRICT_CONTIGUITY))
            current = following
        if node.max_count is not None:
            for _ in range(node.max_count - node.min_count):
                following = self.add_state()
                again = self.add_node(node.node, following)
                self._add_choice(current, again, end, is_greedy=node.is_greedy)
                current = following
            self.epsilons[current].append((end, STRICT_CONTIGUITY))
        elif node.min_count:
            loop = self.add_state()
            inner = self.add_node(node.node, loop)
            self.epsilons[current].append((inner, STRICT_CONTIGUITY))
            self._add_choice(loop, inner, end, is_greedy=node.is_greedy)
        else:
            inner = self.add_node(node.node, current)
            self._add_choice(current, inner, end, is_greedy=node.is_greedy)
        return begin

    def _add_choice(self, state: int, again: int, end: int, *, is_greedy: bool) -> None:
        """Repeat or go on; a greedy repetition tries to repeat first."""
        choices = [(again, STRICT_CONTIGUITY), (end, STRICT_CONTIGUITY)]
        self.epsilons[state] += choices if is_greedy else choices[::-1]

    def closure(self, state: int, end: int) -> list[Transition]:
        """The transitions from a state to states with a symbol or to the end, without epsilons, in
        the order in which they are tried.
        """
        transitions: dict[Transition, None] = {}
        seen: set[tuple[int, Contiguity]] = set()
        pending = list(reversed(self.epsilons[state]))
        while pending:
            target, contiguity = pending.pop()
            if (target, contiguity) in seen:
                continue
            seen.add((target, contiguity))
            if target == end:
                transitions[Transition(ACCEPT)] = None
            elif target in self.symbols:
                transitions[Transition(target, contiguity)] = None
            else:
                pending += [
                    (next_target, contiguity.then(following))
                    for next_target, following in reversed(self.epsilons[target])
                ]
        return list(transitions)


def _components(automaton: Automaton) -> list[list[int]]:
    """Tarjan's strongly connected components: each comes behind all that it leads to."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    components: list[list[int]] = []

    def visit(state: int) -> None:
        order[state] = low[state] = len(order)
        stack.append(state)
        for transition in automaton.transitions[state]:
            target = transition.target
            if target == ACCEPT:
                continue
            if target not in order:
                visit(target)
                low[state] = min(low[state], low[target])
            elif target in stack:
                low[state] = min(low[state], order[target])
        if low[state] == order[state]:
            index = stack.index(state)
            components.append(stack[index:])
            del stack[index:]

    for state in range(len(automaton)):
        if state not in order:
            visit(state)
    return components
