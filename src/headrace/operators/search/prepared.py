"""Documents that carry their words: analysed once, before they go to every shard. Words are columns beside the documents' own, a list for each text column.

`SearchKernel.prepare` adds them where documents are sent, `documents` takes them where they arrive.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.operators.buffers import Ints, offsets_of
from headrace.operators.keys import whole
from headrace.operators.search.analysis import NO_WORD, Tokens
from headrace.operators.search.parsing import Language
from headrace.operators.search.terms import Terms

_WORDS, _STARTS, _ENDS = "_words", "_starts", "_ends"


def with_words(rows: pa.Table, language: Language, *, places: bool) -> pa.Table:
    """The documents with their words; with `places`, also where each begins and ends in its text."""
    for name in language.fields.text:
        tokens = language.analysis.tokens(whole(rows.column(name)))
        offsets = pa.array(tokens.begins.astype(np.int32))
        codes = pa.array(tokens.codes.astype(np.int32), mask=tokens.codes == NO_WORD)
        columns = {_WORDS: pa.DictionaryArray.from_arrays(codes, tokens.terms.array)}
        columns |= {_STARTS: pa.array(tokens.starts), _ENDS: pa.array(tokens.ends)} if places else {}
        for kind, values in columns.items():
            rows = rows.append_column(f"{kind}.{name}", pa.ListArray.from_arrays(offsets, values))
    return rows


def carried_words(rows: pa.Table | pa.RecordBatch, name: str) -> Tokens | None:
    """The words of a text column, if documents carry them."""
    if f"{_WORDS}.{name}" not in rows.schema.names:
        return None
    lists = whole(rows.column(f"{_WORDS}.{name}"))
    words = lists.flatten()
    codes, terms = _used(words.indices.fill_null(NO_WORD).to_numpy().astype(np.int64), words.dictionary)
    begins = offsets_of(lists)
    begins = begins - begins[0]
    starts, ends = _places(rows, f"{_STARTS}.{name}", len(codes)), _places(rows, f"{_ENDS}.{name}", len(codes))
    return Tokens(np.repeat(np.arange(len(lists)), np.diff(begins)), starts, ends, codes, Terms(terms), begins)


def _used(codes: Ints, terms: pa.Array) -> tuple[Ints, pa.Array]:
    """A few documents of many share the others' words: those that they do not have are left out."""
    if 2 * len(codes) > len(terms):
        return codes, terms
    used, places = np.unique(codes, return_inverse=True)
    missing = int(len(used) > 0 and used[0] == NO_WORD)
    return places.astype(np.int64) - missing, terms.take(pa.array(used[missing:]))


def _places(rows: pa.Table | pa.RecordBatch, name: str, count: int) -> Ints:
    """Zeros where nobody asks for places."""
    return whole(rows.column(name)).flatten().to_numpy() if name in rows.schema.names else np.broadcast_to(np.int64(0), count)
