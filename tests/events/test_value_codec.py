"""Values come back as they were, by any hint: hints are generated together with their values."""

import enum
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NamedTuple, NewType, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadEvent, ConfigurationError
from headrace.events.value_codec import ValueCodec


class Colour(enum.Enum):
    RED = "red"
    BLUE = (0, 0, 255)


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True)
class Tree:
    name: str
    below: tuple["Tree", ...] = ()
    due: date | None = None


@dataclass(frozen=True)
class Oak(Tree):
    rings: int = 0


class Point(NamedTuple):
    x: Decimal
    y: float = 0.0


class Options(TypedDict, total=False):
    limit: Decimal
    tags: set[str]


Account = NewType("Account", UUID)
_ZONES = [UTC, timezone(timedelta(hours=2))]
_ALL: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, st.text(max_size=5)),
    (int, st.integers()),
    (float, st.floats(allow_nan=False)),
    (bool, st.booleans()),
    (Decimal, st.decimals(allow_nan=False)),
    (datetime, st.datetimes(timezones=st.sampled_from(_ZONES)).map(lambda t: t.replace(fold=0))),
    (date, st.dates()),
    (time, st.times().map(lambda t: t.replace(fold=0))),
    (timedelta, st.timedeltas()),
    (UUID, st.uuids()),
    (bytes, st.binary(max_size=5)),
    (Colour, st.sampled_from(Colour)),
    (Rights, st.sampled_from([Rights.READ, Rights.READ | Rights.WRITE])),
    (Tree, st.builds(Tree, st.text(max_size=3), st.just((Tree("leaf"), Oak("oak", rings=3))))),
    (Point, st.builds(Point, st.decimals(allow_nan=False))),
    (Options, st.just({"limit": Decimal(1), "tags": {"a", "b"}})),
    (Literal["a", 3], st.sampled_from(["a", 3])),
    (Account, st.uuids()),
]


def containers(
    inner: st.SearchStrategy[tuple[Any, st.SearchStrategy[Any]]],
) -> st.SearchStrategy[tuple[Any, st.SearchStrategy[Any]]]:
    def of(pair: tuple[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
        hint: Any
        hint, values = pair
        few = st.lists(values, max_size=3)
        return st.sampled_from(
            [
                (list[hint], few),
                (tuple[hint, ...], few.map(tuple)),
                (tuple[hint, int], st.tuples(values, st.integers())),
                (Sequence[hint], few.map(tuple)),
                (Sequence[hint], few),
                (dict[str, hint], st.dictionaries(st.text(max_size=3), values, max_size=3)),
                (dict[date, hint], st.dictionaries(st.dates(), values, max_size=3)),
                (
                    dict[tuple[int, str], hint],
                    few.map(lambda v: {(n, "k"): x for n, x in enumerate(v)}),
                ),
                (Mapping[int, hint], st.dictionaries(st.integers(), values, max_size=3)),
                (hint | None, st.none() | values),
                (Any, values),
                (list[Any], few),
                (dict, st.dictionaries(st.sampled_from(["$as", "$is", "value"]), values)),
            ]
        )

    return inner.flatmap(of)


HINTS = st.recursive(st.sampled_from(_ALL), containers, max_leaves=4)


def typed(value: Any) -> Any:
    """A value with the types of everything in it, which `==` does not compare."""
    if isinstance(value, dict):
        return dict, {repr(typed(key)): typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [typed(each) for each in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(typed(each)) for each in value)
    return type(value), repr(value)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), exact=st.booleans())
def test_a_value_comes_back_as_it_was(data: st.DataObject, exact: bool) -> None:
    hint, values = data.draw(HINTS)
    value = data.draw(values)
    codec = ValueCodec(hint, exact=exact, names=globals())
    stored = json.loads(json.dumps(codec.encode(value)))
    assert typed(codec.decode(stored)) == typed(value)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), exact=st.booleans())
def test_each_member_of_a_union_comes_back_as_itself(data: st.DataObject, exact: bool) -> None:
    chosen = data.draw(st.lists(st.sampled_from(_ALL[:15]), min_size=2, max_size=4, unique_by=id))
    hint: Any = chosen[0][0]
    for other, _ in chosen[1:]:
        hint = hint | other
    value = data.draw(st.one_of([values for _, values in chosen]))
    codec = ValueCodec(list[hint], exact=exact, names=globals())
    stored = json.loads(json.dumps(codec.encode([value])))
    assert typed(codec.decode(stored)) == typed([value])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_state_keeps_its_type_whatever_its_hint_says(data: st.DataObject) -> None:
    """An exact codec does not coerce: a float field with an int keeps the int."""
    hint, _ = data.draw(HINTS)
    _, values = data.draw(HINTS)
    value = data.draw(values)
    codec = ValueCodec(hint, exact=True, names=globals())
    try:
        stored = json.loads(json.dumps(codec.encode(value)))
    except BadEvent:
        return
    assert typed(codec.decode(stored)) == typed(value)


def test_the_zone_of_a_time_is_kept_across_the_end_of_summer() -> None:
    codec = ValueCodec(datetime, exact=True)
    zone = ZoneInfo("Europe/Berlin")
    for fold in (0, 1):
        moment = datetime(2026, 10, 25, 2, 30, tzinfo=zone, fold=fold)
        again = codec.decode(codec.encode(moment))
        assert (again.utcoffset(), again.tzinfo, again.fold) == (moment.utcoffset(), zone, fold)


def test_abstract_sets_keep_their_kind() -> None:
    codec = ValueCodec(AbstractSet[Decimal], exact=False)
    for value in ({Decimal(1), Decimal(2)}, frozenset({Decimal(1)})):
        again = codec.decode(json.loads(json.dumps(codec.encode(value))))
        assert (type(again), again) == (type(value), value)


def test_a_union_stored_without_its_type_is_read_if_it_can_only_be_one() -> None:
    """As version 0.1's drafts stored them."""
    codec = ValueCodec(Tree | Oak | Point | Decimal | date, exact=False)
    assert codec.decode({"name": "elm", "below": [], "rings": 9}) == Oak("elm", rings=9)
    assert codec.decode(["1.5", 2.0]) == Point(Decimal("1.5"), 2.0)
    assert codec.decode("2026-03-01") == date(2026, 3, 1)
    with pytest.raises(ValueError, match="can be read as 2 of Tree and Oak"):
        codec.decode({"name": "elm"})


def test_a_union_that_json_cannot_tell_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="two types called list"):
        ValueCodec(list[int] | list[date], exact=False)


def test_plain_json_stays_plain_for_sql() -> None:
    codec = ValueCodec(Decimal | str, exact=False)
    assert (codec.encode("x"), codec.encode(Decimal("1.50"))) == (
        "x",
        {"$as": "Decimal", "value": "1.50"},
    )
    assert ValueCodec(Tree, exact=False).encode(Tree("a")) == {
        "name": "a",
        "below": [],
        "due": None,
    }
