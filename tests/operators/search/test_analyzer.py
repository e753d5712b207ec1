"""Words of texts: the vectorised way against the one that goes character by character."""

import pickle

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigurationError
from headrace.operators.search.analyzer import Analyzer
from tests.operators.search.oracle import words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("Hello, WORLD!", ["hello", "world"]),
        ("Crème brûlée, 2 €", ["creme", "brulee", "2"]),
        ("e\u0301te\u0301", ["ete"]),
        ("\u0301", []),
        ("Straße", ["strasse"]),
        ("東京 2026", ["東", "京", "2026"]),
        ("한국어", ["한국어"]),
        ("हिन्दी", ["हिन्दी"]),
        ("ΣΊΣΥΦΟΣ σίσυφος", ["σισυφοσ", "σισυφοσ"]),
        ("ﬁne Ⅷ Ａ１", ["fine", "viii", "a1"]),
        ("𝐛old 😀 face", ["bold", "face"]),
        ("\U00020000x", ["\U00020000", "x"]),
        ("snake_case", ["snake_case"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert Analyzer().words(text) == words
    assert words_of(text) == words


@given(st.lists(st.none() | st.text() | st.text("abcABC éÉ.東", max_size=20), max_size=6))
def test_columns_are_analysed_as_single_characters_are(texts: list[str | None]) -> None:
    tokens = Analyzer().tokens(pa.array(texts, pa.string()))
    terms = tokens.terms.texts
    found: list[list[str]] = [[] for _ in texts]
    for row, code, start, end in zip(
        tokens.rows, tokens.codes, tokens.starts, tokens.ends, strict=True
    ):
        text = texts[row]
        assert text is not None
        assert words_of(text[start:end]) == [terms[code]]
        found[row].append(terms[code])
    assert found == [words_of(text) for text in texts]
    assert tokens.row_starts.tolist() == [sum(map(len, found[:at])) for at in range(len(texts) + 1)]


def test_a_slice_of_a_column_is_analysed_as_itself() -> None:
    column = pa.array(["one two", "Three", None, "four é five"])
    assert Analyzer().tokens(column.slice(1, 2)).terms.texts == ["three"]
    assert Analyzer().tokens(column.slice(3)).starts.tolist() == [0, 5, 7]


def test_stop_words_keep_their_places_and_stems_are_the_same_on_both_sides() -> None:
    analyzer = Analyzer("english", frozenset({"The", "of"}))
    assert analyzer.words("The runners of running") == [None, "runner", None, "run"]
    assert analyzer.words("running") == ["run"]
    tokens = analyzer.tokens(pa.array(["run runs running the"]))
    assert (tokens.codes.tolist(), tokens.terms.texts) == ([0, 0, 0, -1], ["run"])
    assert pickle.loads(pickle.dumps(analyzer)).words("runs") == ["run"]


def test_an_unknown_language_is_reported_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'english'"):
        Analyzer("englisch").check()
