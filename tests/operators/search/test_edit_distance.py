"""Words that are a few edits away, against the table of edit distances."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.operators.search import edit_distance
from headrace.operators.search.edit_distance import WordList
from tests.short_forms import examples


def distance(one: str, other: str) -> int:
    """Optimal string alignment, cell by cell."""
    table = [[row + column for column in range(len(other) + 1)] for row in range(len(one) + 1)]
    for row in range(1, len(one) + 1):
        for column in range(1, len(other) + 1):
            best = min(
                table[row - 1][column] + 1,
                table[row][column - 1] + 1,
                table[row - 1][column - 1] + (one[row - 1] != other[column - 1]),
            )
            exchanged = one[row - 2 : row] == other[column - 2 : column][::-1]
            if row > 1 and column > 1 and exchanged:
                best = min(best, table[row - 2][column - 2] + 1)
            table[row][column] = best
    return table[-1][-1]


WORDS = st.text("abcé😀", max_size=7)


@settings(max_examples=examples(300), deadline=None)
@given(WORDS, st.lists(WORDS, max_size=30), st.sampled_from([1, 2]))
@example("ab", ["ba", "bca", "abab", ""], 2)
@example("abcdef", ["badcef", "badcfe"], 2)
def test_near_words_are_those_of_the_table(word: str, words: list[str], max_edits: int) -> None:
    expected = [at for at, each in enumerate(words) if distance(word, each) <= max_edits]
    assert WordList(words).near(word, max_edits).tolist() == expected


@settings(max_examples=examples(30), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 2]))
def test_near_words_of_long_words_are_those_of_the_table(random: Random, max_edits: int) -> None:
    word = "".join(random.choices("abcd", k=150))
    words = []
    for _ in range(8):
        letters = list(word)
        for _ in range(random.randint(0, 3)):
            at = random.randrange(len(letters))
            letters[at : at + 1] = random.choice([[], ["x"], [letters[at], "y"]])
        words.append("".join(letters))
    expected = [at for at, each in enumerate(words) if distance(word, each) <= max_edits]
    assert WordList(words).near(word, max_edits).tolist() == expected


def test_a_fuzzy_word_was_compared_with_every_word_of_about_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0
    plain = edit_distance._banded_distances

    def counting(word: Any, texts: Any, max_edits: int) -> Any:
        nonlocal compared
        compared += len(texts) * len(word)
        return plain(word, texts, max_edits)

    monkeypatch.setattr(edit_distance, "_banded_distances", counting)
    numbers = np.random.default_rng(1)
    words = ["".join(chr(97 + each) for each in numbers.integers(0, 26, 8)) for _ in range(5_000)]
    assert WordList(words).near(words[7], 1).tolist() == [7]
    assert compared < 8 * 50
    long_words = [
        "".join(chr(97 + each) for each in numbers.integers(0, 26, 1_000)) for _ in range(50)
    ]
    compared = 0
    assert len(WordList(long_words).near(long_words[0][1:], 2)) == 1
    assert compared < 50 * 64 + 2 * 1_000, "one of 1,000 characters took 34 seconds"
