"""Patterns over sequences of rows (MATCH_RECOGNIZE, complex event processing).

From what a user writes to an automaton:

- `parser`: the text of a pattern to a tree; skip strategies; defaults and bounds.
- `automaton`: the tree to states and transitions.
- `condition_parser`: conditions and measures, in Spark SQL, to trees of `headrace.expressions`.
- `conditions`: the terms that these trees read of the rows of matches.
- `compiled_pattern`: all of it together, checked.

From rows to matches:

- `kernel`: the kernel: buffers rows, matches them, emits matches, retains what is needed.
- `row_buffer`: the buffered rows, in the state and sorted.
- `match_pass`: the patterns of a batch, one after the other.
- `matcher`: one pattern over sorted rows: skip strategies, what is certain when.
- `walker`: runs of the automaton from many rows at once, with look-ahead.
- `path_search`: all partial matches of many rows at once, where look-ahead is not enough.
- `path_memory`: what conditions that look back need to know of a partial match.
- `settings`: the settings of the kernel, and the rows and columns of its result.
- `rules`: patterns as rows of a table, and their kernel.

The steps that build these kernels are in `plan/match_steps.py`; what users write is in
`pipeline/patterns.py` and `sql/matches.py`.
"""
