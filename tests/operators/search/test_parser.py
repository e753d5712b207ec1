"""The query language: what trees texts become, and how mistakes are reported."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadSearch
from headrace.operators.search.analyzer import Analyzer
from headrace.operators.search.parser import MAX_CLAUSES, Language
from headrace.operators.search.syntax import (
    AllOf,
    AtLeast,
    Everything,
    Fields,
    Leaf,
    Not,
    Phrase,
    Regex,
    Word,
)

FIELDS = Fields(
    ("title", "body"),
    (
        ("language", "string"),
        ("price", "float"),
        ("day", "date"),
        ("at", "time"),
        ("stars", "integer"),
        ("live", "boolean"),
    ),
)
LANGUAGE = Language(FIELDS)


def word(text: str, boost: float = 1.0) -> Leaf:
    return Leaf(Word(None, text), boost)


def test_signs_and_operators() -> None:
    assert LANGUAGE.parse("a b") == AtLeast((word("a"), word("b")))
    assert LANGUAGE.parse("+a b -c") == AllOf((word("a"), Not(word("c"))), (word("b"),))
    assert LANGUAGE.parse("a AND b OR NOT c") == AtLeast(
        (AllOf((word("a"), word("b"))), Not(word("c")))
    )
    assert LANGUAGE.parse("a && (b || !c)") == AllOf(
        (word("a"), AtLeast((word("b"), Not(word("c")))))
    )
    assert LANGUAGE.parse("(a b c)~2") == AtLeast((word("a"), word("b"), word("c")), 2)
    assert LANGUAGE.parse("-(-a)") == Not(Not(word("a")))
    assert LANGUAGE.parse("(a b^2)^3") == AtLeast((word("a", 3.0), word("b", 6.0)))


def test_words_side_by_side_may_all_be_needed() -> None:
    every = Language(FIELDS, default="and")
    assert every.parse("a b -c") == AllOf((word("a"), word("b"), Not(word("c"))))
    assert every.parse("a (b c)~1") == AllOf((word("a"), AtLeast((word("b"), word("c")))))


def test_words_of_the_language_are_words_in_lower_case_and_in_quotation_marks() -> None:
    assert LANGUAGE.parse('and OR "OR"') == AtLeast((word("and"), word("or")))
    assert LANGUAGE.parse("ANDy") == word("andy")
    assert LANGUAGE.parse("NOTHING") == word("nothing")


def test_stop_words_leave_gaps_in_phrases_and_nothing_elsewhere() -> None:
    language = Language(FIELDS, Analyzer(stop_words=frozenset({"of", "the"})))
    assert language.parse('"house of the rising"') == Leaf(
        Phrase(None, (("house", 0), ("rising", 3)))
    )
    assert language.parse("the AND house") == word("house")
    with pytest.raises(BadSearch, match="Nothing of the query is left"):
        language.parse('of "the"')


def test_everything() -> None:
    assert LANGUAGE.parse("*:*") == LANGUAGE.parse("*") == Leaf(Everything())


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("", None, "empty"),
        ("   ", None, "empty"),
        ("(storm", 0, "never closed"),
        ("storm)", 5, "closes nothing"),
        ("a titel:storm", 2, "no field 'titel': did you mean 'title'?"),
        ('"heavy rain', 0, "quotation mark is never closed"),
        ("a *b*", 2, "nearly every word"),
        ("?", 0, "nearly every word"),
        ("storm AND", 9, "word is missing"),
        ("AND storm", 0, "AND stands where a word should be"),
        ("()", 0, "nothing between"),
        ("price:cheap", 6, "takes a number"),
        ("price:[1 2]", 9, "TO is missing"),
        ("price:[1 TO 2", 6, "never closed"),
        ("price:[", 7, "two ends"),
        ("price:1*", 6, "has values, not words"),
        ("day:2026-02-30", 4, "takes a day"),
        ("at:yesterday", 3, "takes a time"),
        ("live:yes", 5, "true or false"),
        ("title:[a TO b]", 6, "ranges are for numbers"),
        ("[1 TO 2]", 0, "belongs to a field"),
        ("price:>*", 7, "needs a value"),
        ("(a b)~3", 0, "At least 3 of 2"),
        ("(a b)~", 6, "at least so many"),
        ("a OR +b", 5, "one side of OR"),
        ("storm~3", 0, "at most 2 edits"),
        ("wi-fi~1", 0, "more than one word"),
        ("wi-f*", 0, "more than one word"),
        ('"a b"~5000', 0, "at most 1,000 places"),
        ("storm^", 6, "boost is a number"),
        ("storm^x", 6, "boost is a number"),
        ("\\", 0, "backslash"),
        ("*:x", 0, "every document"),
        ("a ~", 2, "'~' stands where a word should be"),
        ("(" * 60 + "a" + ")" * 60, 32, "levels deep"),
        ("-" * 5_000 + "a", 32, "levels deep"),
        ("title:" * 900 + "a", 186, "levels deep"),
        ('x "' + "a " * 101 + '"', 2, "has 101 words; 100 are the most"),
        ("a." * 101, 0, "has 101 words; 100 are the most"),
        ("a " * (MAX_CLAUSES + 1), 2 * MAX_CLAUSES, "more than 1,024 clauses"),
        ("a" * 30_000, None, "30,000 characters"),
    ],
)
def test_mistakes_are_reported_with_their_position(
    text: str, position: int | None, message: str
) -> None:
    with pytest.raises(BadSearch) as caught:
        LANGUAGE.parse(text)
    assert message in caught.value.message
    assert caught.value.position == position
    assert caught.value.fix
    if position is not None:
        *_, line, caret = caught.value.message.splitlines()
        assert len(caret) <= len(line) + 1
        assert text[position : position + 1].strip() == line[len(caret) - 1 : len(caret)].strip()


@given(st.text('ab "()[]{}+-!&|:^~*?\\TO<>=01AND.', max_size=40) | st.text(max_size=20))
def test_any_text_is_read_or_refused_with_a_place_in_it(text: str) -> None:
    refused: BadSearch | None = None
    try:
        LANGUAGE.parse(text)
    except BadSearch as error:
        refused = error
    assert refused is None or refused.position is None or 0 <= refused.position <= len(text)


def test_regular_expressions_stand_between_slashes() -> None:
    assert LANGUAGE.parse("/stor[mk]s?/") == Leaf(Regex(None, "stor[mk]s?"))
    assert LANGUAGE.parse(r"title:/a\/b|c/^2") == Leaf(Regex("title", "a/b|c"), 2.0)
    assert LANGUAGE.parse("/usr/local") == Leaf(Phrase(None, (("usr", 0), ("local", 1))))
    for text in ("/a)|(b/", "/(a/", "/a{2000}/", f"/{'a' * 501}/", "price:/a/"):
        with pytest.raises(BadSearch):
            LANGUAGE.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        " ".join("word" for _ in range(10_000)),
        " ".join("w" for _ in range(MAX_CLAUSES + 1)),
        "(" * 5_000 + "a" + ")" * 5_000,
        "-" * 5_000 + "a",
        f'"{"a " * 101}"',
        '"a b"~1001',
        f'"a b"~{"9" * 400}',
        f"(a b)~{'9' * 400}",
        f"a~{'9' * 400}",
        " ".join(f"a{number}*b" for number in range(101)),
        " ".join(f"brok{number}~2" for number in range(101)),
        " ".join(f"/a{number}/" for number in range(101)),
    ],
    ids=lambda text: text[:12],
)
def test_bombs_are_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(BadSearch) as raised:
        LANGUAGE.parse(text)
    assert raised.value.fix


def test_a_boost_of_400_digits_is_a_number() -> None:
    (leaf,) = [LANGUAGE.parse(f"storm^{'9' * 400}")]
    assert isinstance(leaf, Leaf)
    assert leaf.boost == 1e15
