"""A pattern's matches as rows: one for each match, or one for each row of it; with the measures, which are computed over all matches at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from headrace.operators.buffers import Ints, runs
from headrace.operators.kernel import Times
from headrace.operators.patterns.compiled import CompiledPattern
from headrace.operators.patterns.conditions import Expression
from headrace.operators.patterns.terms import MATCH_NUMBER, Source, Term
from headrace.operators.patterns.walking import Entries

PATTERN, MATCHED_AT = "pattern", "matched_at"
MOST_AT_ONCE = 1_000_000
"""Entries of prefixes that are looked at together, at about 24 bytes each."""


def one_row(pattern: CompiledPattern, source: Source, entries: Entries, numbers: Ints) -> list[pa.Array]:
    """The measures of each match."""
    terms = tuple(dict.fromkeys(term for _, expression in pattern.measures for term in expression.terms))
    values = dict(zip(terms, _values(terms, source, entries, numbers), strict=True))
    return [_measured(expression, values, len(numbers), source) for _, expression in pattern.measures]


def all_rows(pattern: CompiledPattern, source: Source, entries: Entries, numbers: Ints) -> list[pa.Array]:
    """The measures of each row of each match: over the rows up to it, unless they are final."""
    terms = tuple(dict.fromkeys(term for _, expression in pattern.measures for term in expression.terms))
    final, running = [term for term in terms if term.final], [term for term in terms if not term.final]
    of_match = _values(final, source, entries, numbers)
    values = dict(zip(final, (each.take(pa.array(entries.owner)) for each in of_match), strict=True))
    if running:
        pieces = [_values(running, source, so_far, numbers[entries.owner[first:stop]]) for first, stop, so_far in _prefixes(entries)]
        values |= {term: pa.concat_arrays(each) for term, each in zip(running, zip(*pieces, strict=True), strict=True)}
    return [_measured(expression, values, len(entries.row), source) for _, expression in pattern.measures]


def classifiers(source: Source, entries: Entries) -> pa.Array:
    return pa.array(source.symbols, pa.string()).take(pa.array(entries.place))


def _prefixes(entries: Entries) -> Iterator[tuple[int, int, Entries]]:
    """For each entry those of its match up to it; so many at a time that long matches need no more memory than short ones."""
    begins = np.searchsorted(entries.owner, entries.owner)
    lengths = np.arange(len(entries.owner)) - begins + 1
    pieces = np.cumsum(lengths) // MOST_AT_ONCE
    cuts = np.flatnonzero(np.diff(pieces)) + 1
    for first, stop in pairwise([0, *cuts.tolist(), len(lengths)]):
        some = lengths[first:stop]
        which = runs(begins[first:stop], some)
        yield first, stop, Entries(np.repeat(np.arange(stop - first), some), entries.row[which], entries.place[which])


def _values(terms: Sequence[Term], source: Source, entries: Entries, numbers: Ints) -> list[pa.Array]:
    return [pa.array(numbers) if term.kind == MATCH_NUMBER else source.values([term], entries, len(numbers))[0] for term in terms]


def _measured(expression: Expression, values: dict[Term, pa.Array], count: int, source: Source) -> pa.Array:
    found, _ = expression.over([values[term] for term in expression.terms], count)
    return found.cast(expression.type(source.rows.schema))


def as_times(times: Times, kind: pa.DataType, shift_us: int) -> pa.Array:
    """Event times as the column has them."""
    return pa.array(times - shift_us).cast(pa.timestamp("us", kind.tz)).cast(kind)


