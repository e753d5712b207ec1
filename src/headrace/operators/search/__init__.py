"""Search on streams (percolation): stored queries match passing documents.

From the text of a query to the index:

- `syntax`: the tree of a query; the fields that it may name, and values in their units.
- `parser`: the text of a query to a tree.
- `vocabulary`: every word and test that stored queries use, each with a number (its feature).
- `segment`: queries compiled to columns, with postings under the rarest word of each.
- `index`: segments of falling size; the index as it is cached between batches.

From documents to matches:

- `character_table`: which characters make words, and what each is folded to.
- `analyzer`: texts to words, for queries and documents alike.
- `edit_distance`: words that are a few edits away from a word.
- `documents`: batches of documents, and the features that they have.
- `evaluator`: tests that cost more than a word: phrases, prefixes, ranges; highlights.
- `kernel`: the kernel: queries as state, documents in, matches out.

The steps that build the kernel are in `plan/search_steps.py`; what users write is in
`pipeline/search.py`, and `pipeline/document_search.py` for one query over existing documents.
"""
