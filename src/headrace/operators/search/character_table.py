"""Characters of texts: whether each belongs to a word, and its form without case, accents and
compatibility, as Lucene's ASCIIFoldingFilter and ICU's folding have it.

    Łódź, CRÈME brûlée     lodz, creme brulee
    co-operate, ﬁn          cooperate, fin        a soft hyphen, a ligature
    مُحَمَّدٌ, محمـد            محمد, محمد             vowel marks, a tatweel
    ＡＢＣ, ٣٤                abc, 34               full width, digits of other scripts
    I ❤️ it                  i, ❤, it              an emoji is a word of its own
    か + ゛, ﾊ + ﾟ            が, パ                 characters that are written in two parts
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

# Letters, digits, marks and `_` make words; each ideograph, hiragana and emoji is a word alone.
# Latin letters become those of ASCII. Vowel marks that are usually left out do not matter (Hebrew,
# Arabic); marks of other scripts, which distinguish words, stay. Characters that are not seen do
# not divide a word: soft hyphens, joiners, signs of direction, variation selectors. A zero-width
# space does: it stands between words where no space is written.


BREAK, WORD, ALONE, JOINED = 0, 1, 2, 3
_TABLE_END = 0x20000
FOLDING_VERSION = 3
"""To be raised with every change of what words texts have: indexes of queries are built again."""
_UNMARKED = (
    (0x0300, 0x036F),
    (0x0591, 0x05BD),
    (0x05BF, 0x05BF),
    (0x05C1, 0x05C2),
    (0x05C4, 0x05C5),
    (0x05C7, 0x05C7),
    (0x0610, 0x061A),
    (0x0640, 0x0640),
    (0x064B, 0x065F),
    (0x0670, 0x0670),
    (0x06D6, 0x06DC),
    (0x06DF, 0x06E8),
    (0x06EA, 0x06ED),
    (0x08D3, 0x08E1),
    (0x08E3, 0x08FF),
    (0x1AB0, 0x1AFF),
    (0x1DC0, 0x1DFF),
    (0x20D0, 0x20FF),
    (0xFE20, 0xFE2F),
)
"""Accents, vowel marks of Hebrew and Arabic, and the tatweel, which makes a word longer."""
_UNSEEN = (
    (0x00AD, 0x00AD),
    (0x061C, 0x061C),
    (0x180B, 0x180F),
    (0x200C, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0x1F3FB, 0x1F3FF),
)
"""Format characters and variation selectors; also the tones of skin behind an emoji."""
_EMOJI = ((0x231A, 0x23FF), (0x2600, 0x27BF), (0x2B05, 0x2B55), (0x1F000, 0x1FAFF))
_SOUND_MARKS = ((0x3099, 0x309A),)
"""The sound marks of kana: part of the character before them, which may be a word alone."""
_HANGUL_PARTS = ((0x1161, 0x1175), (0x11A8, 0x11C2))
"""The vowels and last consonants that make a syllable with what is before them."""
_FLAG_LETTERS = ((0x1F1E6, 0x1F1FF),)
_ALONE = (
    (0x3005, 0x3007),
    (0x3041, 0x309F),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)

# Latin letters that are no ASCII letter with a mark, as ASCIIFoldingFilter and ICU fold them.
_LETTERS = {
    "0": "⓿",
    "1": "፩᧚⓵❶➀➊𐩀𐹠𑁒",
    "10": "⓾❿➉➓",
    "11": "⓫",
    "12": "⓬",
    "13": "⓭",
    "14": "⓮",
    "15": "⓯",
    "16": "⓰",
    "17": "⓱",
    "18": "⓲",
    "19": "⓳",
    "2": "ƻ፪⓶❷➁➋𐩁𐹡𑁓",
    "20": "⓴",
    "3": "፫⓷❸➂➌𐩂𐹢𑁔",
    "4": "፬⓸❹➃➍𐩃𐹣𑁕",
    "5": "ƽ፭⓹❺➄➎𐹤𑁖",
    "6": "፮⓺❻➅➏𐹥𑁗",
    "7": "፯⓻❼➆➐𐹦𑁘",
    "8": "፰⓼❽➇➑𐹧𑁙",
    "9": "፱⓽❾➈➒𐹨𑁚",
    "a": "ɐɑɒəɚᴀᶏᶐᶕⱥ",
    "aa": "ꜳ",
    "ae": "æᴁᴂ",
    "ao": "ꜵ",
    "au": "ꜷ",
    "av": "ꜹꜻ",
    "ay": "ꜽ",
    "b": "ƀƃƅɓʙᴃᵬᶀ",
    "c": "ƈȼɕʗᴄↄꜿ",
    "d": "ðđƌƍȡɖɗᴅᴆᵭᶁᶑẟꝺ",
    "db": "ȸ",
    "dz": "ʣʥ",
    "e": "ǝɇɘɛɜɝɞʚᴇᴈᶒᶓᶔⱸⱻ",
    "f": "ƒᵮᶂⅎꜰꝼꟻ",
    "fn": "ʩ",
    "g": "ǥɠɡɢʛᵷᵹᶃꝿ",
    "h": "ħɥɦʜʮʯⱨⱶ",
    "hv": "ƕ",
    "i": "ıɨɩɪᴉᵻᵼᶖꟾ",
    "j": "ȷɉɟʄʝᴊ",
    "k": "ƙʞᴋᶄⱪꝁꝃꝅ",
    "l": "łƚȴɫɬɭʟᴌᶅⱡꝇꝉꞁ",
    "ll": "ỻ",
    "ls": "ʪ",
    "lz": "ʫ",
    "m": "ɯɰɱᴍᴟᵯᶆꟽꟿ",
    "n": "ŋƞȵɲɳɴᴎᵰᶇ",
    "o": "øɔɵʘᴏᴐᴑᴓᴖᴗᶗⱺꝋꝍ",
    "oe": "œɶᴔ",
    "oo": "ꝏ",
    "ou": "ȣᴕ",
    "p": "ƥᴘᵱᵽᶈꝑꝓꝕꟼ",
    "q": "ĸɋʠꝗꝙ",
    "qp": "ȹ",
    "r": "ɍɼɽɾɿʀʁᴙᴚᵲᵳᶉꝛꞃ",
    "s": "ȿʂᵴᶊẜẝꜱꞅ",
    "t": "ŧƫƭȶʇʈᴛᵵⱦꞇ",
    "tc": "ʨ",
    "th": "þᵺꝥꝧ",
    "ts": "ʦ",
    "tz": "ꜩ",
    "u": "ʉᴜᴝᴞᵾᶙ",
    "ue": "ᵫ",
    "v": "ʋʌᴠᶌỽⱱⱴꝟꝩ",
    "vy": "ꝡ",
    "w": "ƿʍᴡⱳ",
    "ww": "ʬ",
    "x": "ᶍ",
    "y": "ƴɏʎʏỿ",
    "z": "ƶȝȥɀʐʑᴢᵶᶎⱬꝣ",
}

CodePoints = npt.NDArray[np.uint32]


def character_kind(character: str) -> int:
    """The kind of a character: BREAK, WORD, ALONE, or JOINED to the character before it."""
    if _within(ord(character), _SOUND_MARKS):
        return JOINED
    if _within(ord(character), _ALONE):
        return ALONE
    point = ord(character)
    if point >= _TABLE_END:
        return BREAK
    category = unicodedata.category(character)
    if character == "_" or category[0] in "LNM":
        return WORD
    if _within(point, _UNSEEN) or _within(point, _FLAG_LETTERS):
        return WORD
    return ALONE if category == "So" and _within(point, _EMOJI) else BREAK


def fold_character(character: str) -> str:
    """The character without case, accents and compatibility forms: nothing, one character, or
    several.
    """
    if ord(character) >= _TABLE_END:
        return character
    apart = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
    kept = (
        _plain_letter(each)
        for each in apart
        if not _within(ord(each), _UNMARKED) and not _within(ord(each), _UNSEEN)
    )
    folded = unicodedata.normalize("NFC", "".join(kept))
    if character.isalpha() and any("a" <= each <= "z" for each in folded):
        # Signs that were part of a letter: ŀ, ŉ.
        folded = "".join(each for each in folded if each.isascii() and each.isalnum()) or folded
    return folded


def _plain_letter(character: str) -> str:
    """An ASCII letter or digit for a Latin letter, or for a digit of any script."""
    digit = unicodedata.digit(character, None)
    if digit is not None and unicodedata.category(character) == "Nd":
        return str(digit)
    return _plain_letters().get(character, character)


@cache
def _plain_letters() -> dict[str, str]:
    return {letter: plain for plain, letters in _LETTERS.items() for letter in letters}


def _within(point: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= point <= high for low, high in ranges)


@dataclass(frozen=True)
class CharacterTable:
    """For each code point: its kind, where in `text` its folded form begins and ends, and whether
    it may become one with the character before it, or change places with it.
    """

    kinds: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    text: CodePoints
    combines: npt.NDArray[np.bool_]

    def is_composed(self, folded: CodePoints) -> bool:
        """Whether no characters of a folded text combine."""
        return not self.combines[np.minimum(folded, _TABLE_END)].any()

    def kinds_of(self, points: CodePoints) -> npt.NDArray[np.uint8]:
        """The kinds of code points. Beyond the table are ideographs, and what is in no word."""
        if len(points) and points.max() < _TABLE_END:
            return self.kinds[np.minimum(points, _TABLE_END)]
        kinds = self.kinds[np.minimum(points, _TABLE_END - 1)].copy()
        rare = points >= _TABLE_END
        kinds[rare] = np.where(points[rare] <= _ALONE[-1][1], ALONE, BREAK)
        return kinds

    def fold(self, points: CodePoints) -> tuple[CodePoints, npt.NDArray[np.int64]]:
        """The folded text, and where in it each of the characters begins; the last number is the
        text's length.
        """
        at = np.minimum(points, _TABLE_END - 1)
        rare = points >= _TABLE_END
        lengths = np.where(rare, 1, self.starts[at + 1] - self.starts[at])
        folded_starts = np.append(0, np.cumsum(lengths))
        within = np.arange(int(folded_starts[-1])) - np.repeat(folded_starts[:-1], lengths)
        text = self.text[
            np.minimum(np.repeat(self.starts[at], lengths) + within, len(self.text) - 1)
        ]
        return (
            np.where(np.repeat(rare, lengths), np.repeat(points, lengths), text).astype(np.uint32),
            folded_starts,
        )


@cache
def character_table() -> CharacterTable:
    """The table of all characters; built once a process, in a fifth of a second."""
    kinds = np.zeros(_TABLE_END + 1, np.uint8)
    combines = np.zeros(_TABLE_END + 1, np.bool_)
    for first, last in _HANGUL_PARTS:
        combines[first : last + 1] = True
    forms = []
    for point in range(_TABLE_END):
        character = chr(point)
        if 0xD800 <= point <= 0xDFFF or (kind := character_kind(character)) == BREAK:
            forms.append(character if point < 0xD800 or point > 0xDFFF else "")
            continue
        kinds[point] = kind
        forms.append(fold_character(character))
        combines[point] |= unicodedata.combining(character) > 0
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            combines[int(parts[1], 16)] = True
    starts = np.append(0, np.cumsum([len(form) for form in forms]))
    return CharacterTable(
        kinds=kinds,
        starts=starts,
        text=np.frombuffer("".join(forms).encode("utf-32-le"), np.uint32),
        combines=combines,
    )


@cache
def ascii_table() -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]:
    """The table of ASCII, which is quicker: which bytes belong to words, and each byte in lower
    case.
    """
    characters = [chr(point) for point in range(128)]
    return np.array([character_kind(each) == WORD for each in characters]), np.array(
        [ord(each.lower()) for each in characters], np.uint8
    )
