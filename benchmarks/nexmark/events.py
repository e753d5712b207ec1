"""Nexmark's persons, auctions and bids, made after the definition of the benchmark: of each 50
events one is a person, three are auctions and 46 are bids.

    number   0        1 2 3      4 … 49    50       51 52 53    54 …
             person   auctions   bids      person   auctions    bids

An event follows from the seed and its number alone: a draw is a hash of the seed, the number and
what is drawn. So a million events begin with the same thousand as a thousand events, and a range
can be made without what is before it.

- Three quarters of the auctions are of a hot seller, the first of the last hundred persons; three
  quarters of the bids by a hot bidder, the second of the last hundred; half of the bids on a hot
  auction, the first of the last hundred. The others are drawn from the newest thousand persons and
  hundred auctions, and from ten that do not exist yet.
- Prices are log-uniform from 1 to a million, in cents.
- Half of the bids come by one of four channels, the others by one of 10,000, nine in ten of which
  are part of the url.
- `extra` fills a person up to 200 bytes on average, an auction to 500, a bid to 100.
- The first id of persons is added to a bidder twice, as the benchmark's generator does: bidders are
  1,000 above the persons they are drawn from.
- Times are whole milliseconds; an auction ends within twice the time in which a hundred are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

PERSON_SCHEMA = (
    "id BIGINT, name STRING, emailAddress STRING, creditCard STRING, city STRING, state STRING,"
    " dateTime TIMESTAMP, extra STRING"
)
AUCTION_SCHEMA = (
    "id BIGINT, itemName STRING, description STRING, initialBid BIGINT, reserve BIGINT,"
    " dateTime TIMESTAMP, expires TIMESTAMP, seller BIGINT, category BIGINT, extra STRING"
)
BID_SCHEMA = (
    "auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, dateTime TIMESTAMP,"
    " extra STRING"
)
SCHEMAS = {"person": PERSON_SCHEMA, "auction": AUCTION_SCHEMA, "bid": BID_SCHEMA}

START_MS = 1_767_225_600_000  # 2026-01-01
RATE = 10_000
"""Events a second of event time."""

_PERSONS, _AUCTIONS, _ROUND = 1, 3, 50
_FIRST_PERSON = _FIRST_AUCTION = 1000
_FIRST_CATEGORY, _CATEGORIES = 10, 5
_ACTIVE_PERSONS, _OPEN_AUCTIONS, _LEAD = 1000, 100, 10
_HOT_SELLERS = _HOT_BIDDERS = 4  # all but one in so many are of the hot one
_HOT_AUCTIONS = 2
_HOT_EVERY = 100
_PERSON_BYTES, _AUCTION_BYTES, _BID_BYTES = 200, 500, 100
_DISORDER_STEP = 953
_STATES = ["AZ", "CA", "ID", "OR", "WA", "WY"]
_CITIES = [
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
]
_FIRST_NAMES = [
    "Peter",
    "Paul",
    "Luke",
    "John",
    "Saul",
    "Vicky",
    "Kate",
    "Julie",
    "Sarah",
    "Deiter",
    "Walter",
]
_LAST_NAMES = [
    "Shultz",
    "Abrams",
    "Spencer",
    "White",
    "Bartels",
    "Walton",
    "Smith",
    "Jones",
    "Noris",
]
_HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
_CHANNELS = 10_000
_SIDE_ROWS = 10_000
_POOL_BYTES = 1 << 20
_MIN_TEXT = 3

Numbers = npt.NDArray[np.int64]
Texts = Any
"""A column of STRING."""


@dataclass(frozen=True)
class Events:
    """Some events in order of arrival, by kind."""

    person: pa.Table
    auction: pa.Table
    bid: pa.Table

    def tables(self) -> dict[str, pa.Table]:
        return {"person": self.person, "auction": self.auction, "bid": self.bid}


def events(
    count: int, *, first: int = 0, seed: int = 1, rate: int = RATE, disorder: int = 1
) -> Events:
    """Make events.

    Args:
        count: How many.
        first: The number of the first one.
        seed: What all draws depend on.
        rate: Events a second of event time.
        disorder: Within each so many events, they arrive in another order; no multiple of 953.

    Returns:
        The events in order of arrival.

    """
    arrival = np.arange(first, first + count)
    group = arrival // disorder * disorder
    numbers = group + arrival * _DISORDER_STEP % disorder
    kind = numbers % _ROUND
    is_person, is_bid = kind < _PERSONS, kind >= _PERSONS + _AUCTIONS
    return Events(
        person=_persons(_Draws(seed, numbers[is_person]), rate),
        auction=_auctions(_Draws(seed, numbers[~is_person & ~is_bid]), rate),
        bid=_bids(_Draws(seed, numbers[is_bid]), rate),
    )


def side_input() -> pa.Table:
    """The small table that bids are joined with: each number, and the same as text."""
    keys = pa.array(np.arange(_SIDE_ROWS))
    return pa.table({"key": keys, "value": keys.cast(pa.string())})


class _Draws:
    """What is drawn for some events. Each draw has a number of its own, so adding one changes no
    other.
    """

    def __init__(self, seed: int, numbers: Numbers) -> None:
        self.numbers = numbers
        self._base = _mixed(numbers.astype(np.uint64) + (np.uint64(seed) << np.uint64(40)))
        self._count = 0

    def bits(self) -> npt.NDArray[np.uint64]:
        self._count += 1
        return _mixed(self._base ^ _mixed(np.array([self._count], np.uint64)))

    def below(self, bounds: int | Numbers) -> Numbers:
        """Whole numbers from 0 up to some bounds, which are below 2^31."""
        high = (self.bits() >> np.uint64(33)) * np.asarray(bounds, np.uint64) >> np.uint64(31)
        return high.astype(np.int64)

    def choice(self, texts: list[str] | pa.Array) -> Texts:
        return pa.array(texts, pa.string()).take(pa.array(self.below(len(texts))))

    def price(self) -> Numbers:
        share = (self.bits() >> np.uint64(11)).astype(np.float64) / (1 << 53)
        cents: Numbers = np.floor(10 ** (share * 6) * 100 + 0.5).astype(np.int64)
        return cents

    def text(self, longest: int) -> Texts:
        """Words of letters and spaces, shorter than `longest`."""
        lengths = _MIN_TEXT + self.below(longest - _MIN_TEXT)
        return pc.utf8_trim(self._pieces(lengths, " "), " ")

    def extra(self, bytes_before: Numbers, average: int) -> Texts:
        """Letters that fill rows up to an average number of bytes, give or take a fifth of what is
        missing.
        """
        missing = np.maximum(average - bytes_before, 0)
        spread = np.floor(missing * 0.2 + 0.5).astype(np.int64)
        return self._pieces(missing - spread + self.below(2 * spread), "")

    def _pieces(self, lengths: Numbers, special: str) -> Texts:
        """Pieces of a long random text."""
        text = _pool(special)
        starts = self.below(_POOL_BYTES - 512)
        ends = np.cumsum(lengths)
        positions = np.arange(int(ends[-1]) if len(ends) else 0)
        data = text[positions + np.repeat(starts - (ends - lengths), lengths)]
        offsets = np.concatenate([[0], ends]).astype(np.int64)
        return pa.LargeStringArray.from_buffers(
            len(lengths), pa.py_buffer(offsets), pa.py_buffer(data)
        ).cast(pa.string())


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each number mixed into one that looks random (the finalizer of SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@cache
def _pool(special: str) -> npt.NDArray[np.uint8]:
    """A long text of random letters, one in 13 of them the special one."""
    draws = _Draws(seed=0, numbers=np.arange(_POOL_BYTES))
    letters = ord("a") + draws.below(26)
    if special:
        letters = np.where(draws.below(13) == 0, ord(special), letters)
    return letters.astype(np.uint8)


@cache
def _channels() -> tuple[Texts, Texts]:
    """The names and urls of all channels, the hot ones first."""
    draws = _Draws(seed=0, numbers=np.arange(len(_HOT_CHANNELS) + _CHANNELS))
    parts = [pc.replace_substring(draws.text(5), " ", "_") for _ in range(3)]
    base = pc.binary_join_element_wise("https://www.nexmark.com", *parts, "item.htm?query=1", "/")
    numbers = np.arange(_CHANNELS)
    reversed_bits = np.array([int(f"{number:032b}"[::-1], 2) for number in numbers])
    ids = np.abs(reversed_bits.astype(np.uint32).view(np.int32).astype(np.int64))
    has_id = pa.array(draws.below(10)[len(_HOT_CHANNELS) :] > 0)
    own = base[len(_HOT_CHANNELS) :]
    with_id = pc.binary_join_element_wise(own, pa.array(ids).cast(pa.string()), "&channel_id=")
    urls = pa.concat_arrays([base[: len(_HOT_CHANNELS)], pc.if_else(has_id, with_id, own)])
    names = pa.array([*_HOT_CHANNELS, *(f"channel-{number}" for number in numbers)])
    return names, urls


# Which persons and auctions there are


def _last_person(numbers: Numbers) -> Numbers:
    """The newest person when an event is made, from 0."""
    return numbers // _ROUND * _PERSONS + np.minimum(numbers % _ROUND, _PERSONS - 1)


def _last_auction(numbers: Numbers) -> Numbers:
    """The newest auction when an event is made, from 0; -1 before the first one."""
    in_round = np.clip(numbers % _ROUND - _PERSONS, -1, _AUCTIONS - 1)
    return numbers // _ROUND * _AUCTIONS + in_round


def _some_person(draws: _Draws) -> Numbers:
    """One of the active persons, or one of those that come next."""
    count = _last_person(draws.numbers) + 1
    active = np.minimum(count, _ACTIVE_PERSONS)
    return count - active + draws.below(active + _LEAD)


def _some_auction(draws: _Draws) -> Numbers:
    """One of the open auctions, or one of those that come next."""
    newest = _last_auction(draws.numbers)
    oldest = np.maximum(newest - _OPEN_AUCTIONS, 0)
    return oldest + draws.below(newest - oldest + 1 + _LEAD)


def _milliseconds(numbers: Numbers, rate: int) -> Numbers:
    return START_MS + numbers * 1000 // rate


def _timestamps(milliseconds: Numbers) -> pa.Array:
    return pa.array(milliseconds * 1000).cast(pa.timestamp("us", "UTC"))


# The events


def _lengths(*texts: Texts) -> Numbers:
    total: Numbers = sum(pc.binary_length(text).to_numpy().astype(np.int64) for text in texts)
    return total


def _persons(draws: _Draws, rate: int) -> pa.Table:
    name = pc.binary_join_element_wise(draws.choice(_FIRST_NAMES), draws.choice(_LAST_NAMES), " ")
    at = pc.binary_join_element_wise(draws.text(7), draws.text(5), "@")
    email = pc.binary_join_element_wise(at, ".com", "")
    quarters = [
        pc.utf8_lpad(pa.array(draws.below(10_000)).cast(pa.string()), 4, "0") for _ in range(4)
    ]
    card = pc.binary_join_element_wise(*quarters, " ")
    city, state = draws.choice(_CITIES), draws.choice(_STATES)
    return pa.table(
        {
            "id": _last_person(draws.numbers) + _FIRST_PERSON,
            "name": name,
            "emailAddress": email,
            "creditCard": card,
            "city": city,
            "state": state,
            "dateTime": _timestamps(_milliseconds(draws.numbers, rate)),
            "extra": draws.extra(8 + _lengths(name, email, card, city, state), _PERSON_BYTES),
        }
    )


def _auctions(draws: _Draws, rate: int) -> pa.Table:
    numbers = draws.numbers
    hot = _last_person(numbers) // _HOT_EVERY * _HOT_EVERY
    seller = np.where(draws.below(_HOT_SELLERS) > 0, hot, _some_person(draws)) + _FIRST_PERSON
    category = _FIRST_CATEGORY + draws.below(_CATEGORIES)
    initial = draws.price()
    begins = _milliseconds(numbers, rate)
    horizon = _milliseconds(numbers + _OPEN_AUCTIONS * _ROUND // _AUCTIONS, rate) - begins
    expires = begins + 1 + draws.below(np.maximum(horizon * 2, 1))
    name, description = draws.text(20), draws.text(100)
    return pa.table(
        {
            "id": _last_auction(numbers) + _FIRST_AUCTION,
            "itemName": name,
            "description": description,
            "initialBid": initial,
            "reserve": initial + draws.price(),
            "dateTime": _timestamps(begins),
            "expires": _timestamps(expires),
            "seller": seller,
            "category": category,
            "extra": draws.extra(48 + _lengths(name, description), _AUCTION_BYTES),
        }
    )


def _bids(draws: _Draws, rate: int) -> pa.Table:
    numbers = draws.numbers
    hot = _last_auction(numbers) // _HOT_EVERY * _HOT_EVERY
    auction = np.where(draws.below(_HOT_AUCTIONS) > 0, hot, _some_auction(draws))
    hot_bidder = _last_person(numbers) // _HOT_EVERY * _HOT_EVERY + 1
    bidder = np.where(draws.below(_HOT_BIDDERS) > 0, hot_bidder, _some_person(draws))
    is_hot_channel = draws.below(2) > 0
    some_channel = len(_HOT_CHANNELS) + draws.below(_CHANNELS)
    channel = pa.array(np.where(is_hot_channel, draws.below(len(_HOT_CHANNELS)), some_channel))
    names, urls = _channels()
    return pa.table(
        {
            "auction": auction + _FIRST_AUCTION,
            "bidder": bidder + 2 * _FIRST_PERSON,
            "price": draws.price(),
            "channel": names.take(channel),
            "url": urls.take(channel),
            "dateTime": _timestamps(_milliseconds(numbers, rate)),
            "extra": draws.extra(np.full(len(numbers), 32), _BID_BYTES),
        }
    )
