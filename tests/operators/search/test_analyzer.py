"""Words of texts: the vectorised way against the one that goes character by character."""

import pickle
import unicodedata
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigurationError
from headrace.operators.search.analyzer import Analyzer
from headrace.operators.search.character_table import fold_character
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
        ("𝐛old 😀 face", ["bold", "😀", "face"]),
        ("\U00020000x", ["\U00020000", "x"]),
        ("snake_case", ["snake_case"]),
        ("Łódź Øresund đak ŀa", ["lodz", "oresund", "dak", "la"]),
        (
            "co\u00adoperate zero\u200bwidth می\u200cخواهم",
            ["cooperate", "zero", "width", "میخواهم"],
        ),
        ("مُحَمَّدٌ محمـد", ["محمد", "محمد"]),
        ("שָׁלוֹם", ["שלום"]),
        ("٣٤ ３４", ["34", "34"]),
        ("I❤️it 👩\u200d💻 👍🏽ok 🇩🇪", ["i", "❤", "it", "👩", "💻", "👍", "ok", "🇩🇪"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert Analyzer().words(text) == words
    assert words_of(text) == words


@pytest.mark.parametrize(
    "text",
    ["パン", "がく とび", "한국어", "कोन ড়", "ໝໍ", "ཀཱི", "Việt йод ἄνθρωπος", "漢が字", "🍕が"],
)
def test_characters_written_in_parts_were_other_words(text: str) -> None:
    """A file name of macOS, `か` with a sound mark for `が`, was not found."""
    words = Analyzer().words(unicodedata.normalize("NFC", text))
    for form in ("NFD", "NFKC", "NFKD"):
        parts = unicodedata.normalize(form, text)
        assert Analyzer().words(parts) == words == words_of(parts)


def test_half_width_kana_with_a_sound_mark() -> None:
    assert Analyzer().words("ﾊﾟﾝ ｶﾞ") == ["パン", "ガ"]
    assert Analyzer().words("\u3099 か\u3099か \u3099") == words_of("が か") == ["が", "か"]
    columns = pa.array(["か", "\u3099か", "a\u3099b c"])
    assert Analyzer().tokens(columns).rows.tolist() == [0, 1, 2, 2]


def test_letters_that_unicode_does_not_take_apart_were_not_folded() -> None:
    """As Lucene folds them, which is in the data file."""
    for line in (Path(__file__).parent / "lucene_folding.txt").read_text().splitlines():
        plain, _, points = line.partition(": ")
        for point in points.split() if not line.startswith("#") else ():
            assert fold_character(chr(int(point, 16))) == plain, point


@given(
    st.lists(
        st.none() | st.text() | st.text("abcABC éÉ.東가\u1100\u1161か\u3099", max_size=20),
        max_size=6,
    )
)
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
