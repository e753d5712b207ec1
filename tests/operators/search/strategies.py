"""Queries and documents by chance, of every kind, over so few words that they meet."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from headrace.operators.search.parser import Language
from headrace.operators.search.syntax import Fields

FIELDS = Fields(
    ("title", "body"),
    (
        ("language", "string"),
        ("price", "float"),
        ("day", "date"),
        ("at", "time"),
        ("stars", "integer"),
    ),
)
LANGUAGE = Language(FIELDS)
SCHEMA = pa.schema(
    [
        ("title", pa.string()),
        ("body", pa.string()),
        ("language", pa.string()),
        ("price", pa.float64()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("stars", pa.int64()),
    ]
)
WORDS = ("sea", "see", "seas", "storm", "Storms", "wind", "é", "ete", "東京", "new", "york")
_days = st.dates(date(2026, 1, 1), date(2026, 1, 4))
_numbers = st.sampled_from([0, 1, 2, 3])

_word = st.sampled_from(WORDS)
_field = st.sampled_from(["", "", "title:", "body:"])
_phrase = st.builds(
    lambda words, slop: f'"{" ".join(words)}"{slop}',
    st.lists(_word, min_size=1, max_size=3),
    st.sampled_from(["", "", "~1", "~2", "~4"]),
)
_wild = st.sampled_from(
    [
        "se*",
        "s*",
        "st?rm",
        "st?rm*",
        "s*a",
        "*orm",
        "w*n*d",
        "storm~1",
        "sea~1",
        "seen~2",
        "york~",
        "ne?",
    ]
)
_filter = st.one_of(
    st.sampled_from(
        [
            "language:en",
            "language:de",
            "language:e*",
            "language:*",
            "price:*",
            "title:*",
            "*:*",
            "(NOT *:*)",
        ]
    ),
    st.builds("price:[{} TO {}]".format, _numbers, _numbers),
    st.builds("stars:{{{} TO {}.5]".format, _numbers, _numbers),
    st.builds("stars:>{}".format, _numbers),
    st.builds("day:[{} TO *]".format, _days),
    st.builds("at:<={}".format, _days),
)
_leaf = st.builds("".join, st.tuples(_field, _word | _word | _word | _phrase | _wild)) | _filter
_boosted = _leaf | st.builds("{}^2".format, _leaf)


def _groups(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=2, max_size=4)
    return st.one_of(
        several.map(lambda parts: f"({' OR '.join(parts)})"),
        several.map(lambda parts: f"({' AND '.join(parts)})"),
        several.map(lambda parts: f"({' '.join(parts)})"),
        several.map(lambda parts: f"({' '.join(parts)})~2"),
        several.map(lambda parts: f"(+{' '.join(parts)})"),
        several.map(lambda parts: f"(+{' +'.join(parts)})"),
        several.map(lambda parts: f"({' -'.join(parts)})"),
        inner.map(lambda part: f"(NOT {part})"),
    )


queries = st.recursive(_boosted, _groups, max_leaves=8)
_text = st.none() | st.lists(_word | st.sampled_from([",", "the"]), max_size=8).map(" ".join)
documents: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "title": _text,
        "body": _text,
        "language": st.sampled_from([None, "en", "de", ""]),
        "price": st.sampled_from([None, 0.0, 1.0, 1.5, 2.0, float("nan")]),
        "day": st.none() | _days,
        "at": (
            st.none()
            | st.datetimes(datetime(2026, 1, 1), datetime(2026, 1, 4)).map(  # noqa: DTZ001
                lambda at: at.replace(tzinfo=UTC)
            )
        ),
        "stars": st.none() | _numbers,
    }
)


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, SCHEMA)
