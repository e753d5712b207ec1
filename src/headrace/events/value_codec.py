"""Values of events and states as JSON and back, by their type hints.

`ValueCodec(hint)` is built once, when an event class or a decider is declared, and refuses there
what cannot be stored. JSON has fewer types than Python: a member of a union that JSON does not tell
from the others says which it is (`$as`), and a value where nothing is declared says its type
(`$is`).

    hint               value                   JSON
    Decimal            Decimal("9.50")         "9.50"
    Decimal | str      Decimal("9.50")         {"$as": "Decimal", "value": "9.50"}
    Cash | Card        Cash(5)                 {"$as": "Cash", "value": {"amount": 5}}
    dict               {"due": date(2026,3,1)} {"due": {"$is": "date", "value": "2026-03-01"}}
    tuple[int, ...]    (1, 2)                  [1, 2]

Two modes differ in what they do with a value that does not fit its hint. A state is *exact*: the
value is stored with its own type, whatever the hint says. An event is coerced to its hint, if that
is possible, so that its JSON stays plain for SQL: what is read back is what the hint says.
"""

from __future__ import annotations

import base64
import collections.abc
import json
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, InitVar, dataclass, fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from typing import (
    Annotated,
    Any,
    Literal,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from uuid import UUID
from zoneinfo import ZoneInfo

from headrace.errors import BadEvent, ConfigurationError

TAG, SELF, VALUE = "$as", "$is", "value"
_PLAIN = (str, int, float, bool, type(None))
_ALLOWED = (
    "use plain values, dates, times, decimals, UUIDs, bytes, enums, dataclasses, NamedTuples, and"
    " lists, tuples, sets and dicts of them"
)


def _zoned(value: datetime | time) -> str:
    """ISO 8601, with the name of the time zone in brackets if it has one (RFC 9557)."""
    name = getattr(value.tzinfo, "key", None)
    return value.isoformat() if name is None else f"{value.isoformat()}[{name}]"


def _from_zoned(text: str) -> datetime:
    moment, _, name = text.removesuffix("]").partition("[")
    parsed = datetime.fromisoformat(moment)
    if not name:
        return parsed
    local = parsed.replace(tzinfo=ZoneInfo(name))
    return local if local.utcoffset() == parsed.utcoffset() else local.replace(fold=1)


def _time_from_zoned(text: str) -> time:
    moment, _, name = text.removesuffix("]").partition("[")
    parsed = time.fromisoformat(moment)
    return parsed.replace(tzinfo=ZoneInfo(name)) if name else parsed


def _to_decimal(value: Any) -> Decimal:
    return Decimal(repr(value) if isinstance(value, float) else value)


_SCALARS: dict[Any, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    Decimal: (str, _to_decimal, "string"),
    datetime: (_zoned, _from_zoned, "string"),
    date: (date.isoformat, date.fromisoformat, "string"),
    time: (_zoned, _time_from_zoned, "string"),
    timedelta: (
        lambda value: value // timedelta(microseconds=1),
        lambda value: timedelta(microseconds=value),
        "number",
    ),
    UUID: (str, UUID, "string"),
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode, "string"),
    bytearray: (
        lambda value: base64.b64encode(value).decode(),
        lambda value: bytearray(base64.b64decode(value)),
        "string",
    ),
    complex: (str, complex, "string"),
}
"""How a scalar is written, how it is read, and which kind of JSON it is."""
_SCALAR_NAMES = {kind.__name__: kind for kind in _SCALARS}
_CONTAINER_NAMES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_ABSTRACT_LISTS = (
    collections.abc.Sequence,
    collections.abc.MutableSequence,
    collections.abc.Collection,
    collections.abc.Iterable,
)
_ABSTRACT_DICTS = (collections.abc.Mapping, collections.abc.MutableMapping)
_ABSTRACT_SETS: dict[Any, type] = {collections.abc.Set: frozenset, collections.abc.MutableSet: set}
_TEXT_KEYS = (int, UUID, Decimal, date, datetime)
"""Types of keys that become the names of a JSON object, besides texts."""


def json_text(value: Any) -> str:
    """One text for each JSON value, whoever writes it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def loose_json(value: Any) -> Any:
    """What JSON can say of a value, without its types: for people, and for coercion. BadEvent if it
    cannot say it.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _SCALARS:
        return value.isoformat() if kind is datetime else _SCALARS[kind][0](value)
    if isinstance(value, Enum):
        return loose_json(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: loose_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [loose_json(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((loose_json(each) for each in value), key=repr)
    if isinstance(value, dict):
        return {
            key if type(key) is str else str(loose_json(key)): loose_json(each)
            for key, each in value.items()
        }
    raise BadEvent(f"A {kind.__name__} cannot be stored: {value!r:.80}.", fix=f"{_ALLOWED}.")


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class _Form:
    """How the values of one hint are stored."""

    label: str
    """Its name in a tag."""
    encode: Callable[[Any], Any]
    """A value that fits, as JSON."""
    decode: Callable[[Any], Any]
    fits: Callable[[Any], bool]
    """Whether a value is of this type, not counting what is in it."""
    kinds: frozenset[str]
    """Which kinds of JSON `encode` gives: null, boolean, number, string, array, object."""
    is_precise: bool = True
    """Whether the hint tells all types, so that no value ever needs a tag."""


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


_IDENTITY_KINDS: dict[Any, frozenset[str]] = {
    str: frozenset({"string"}),
    int: frozenset({"number"}),
    float: frozenset({"number"}),
    bool: frozenset({"boolean"}),
    type(None): frozenset({"null"}),
}


class ValueCodec:
    """Encodes the values of one type as JSON, and decodes them.

    Args:
        hint: The type, as an annotation says it.
        exact: Whether values that do not fit their hint keep their own type (states), or are
            coerced (events).
        names: Classes that values may have where the hint does not tell the type, by name.

    Raises:
        ConfigurationError: Values of that type cannot be stored.
    """

    def __init__(
        self, hint: Any, *, exact: bool, names: Mapping[str, Any] | None = None, what: str = ""
    ) -> None:
        self._exact = exact
        self._names = names or {}
        self._forms: dict[Any, _Form] = {}
        self._path: list[str] = [what] if what else []
        self._form = self._compile(hint)
        self.is_precise = self._form.is_precise
        self.decode = self._reader(self._form)

    def encode(self, value: Any) -> Any:
        """A value as JSON. BadEvent if it cannot be stored so that it is read back the same."""
        return self._write(self._form, value)

    # Values against their form

    def _write(self, form: _Form, value: Any) -> Any:
        if form.fits(value):
            return form.encode(value)
        if self._exact:
            return self._tagged(value)
        if is_dataclass(value) and not isinstance(value, type):
            raise self._unfit(form, value)
        plain = loose_json(value)
        try:
            form.decode(plain)
        except Exception as error:
            raise self._unfit(form, value) from error
        return plain

    @staticmethod
    def _unfit(form: _Form, value: Any) -> BadEvent:
        return BadEvent(
            f"{value!r:.80} is a {type(value).__name__}, where {form.label} was declared, and would"
            " not be read back.",
            fix="give what the class declares, or declare what it gets.",
        )

    def _reader(self, form: _Form) -> Callable[[Any], Any]:
        """How stored values are read: those of states may have a type of their own anywhere."""
        if not self._exact:
            return form.decode
        decode = form.decode
        return lambda value: (
            None
            if value is None
            else self._untagged(value, decode)
            if type(value) is dict and SELF in value
            else decode(value)
        )

    # Values that say their type

    def _any(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return [self._any(each) for each in value]
        if kind is dict and _is_plain_dict(value):
            return {key: self._any(each) for key, each in value.items()}
        return self._tagged(value)

    def _tagged(self, value: Any) -> Any:
        kind = type(value)
        if value is None:
            return None
        if kind in _PLAIN:
            return {SELF: kind.__name__, VALUE: value}
        if kind in _SCALARS:
            return {SELF: kind.__name__, VALUE: _SCALARS[kind][0](value)}
        if kind is dict:
            pairs = [[self._any(key), self._any(each)] for key, each in value.items()]
            return {SELF: "dict", VALUE: pairs}
        if kind in {list, tuple}:
            return {SELF: kind.__name__, VALUE: [self._any(each) for each in value]}
        if kind in {set, frozenset}:
            return {SELF: kind.__name__, VALUE: sorted(map(self._any, value), key=json_text)}
        if self._names.get(kind.__name__) is kind and _is_record(kind):
            return {SELF: kind.__name__, VALUE: self._compile(kind).encode(value)}
        raise BadEvent(
            f"A {kind.__qualname__} cannot be stored here: {value!r:.80}.",
            fix=f"name its class in the annotation, if it is a dataclass; otherwise {_ALLOWED}.",
        )

    def _untagged(self, value: dict[str, Any], otherwise: Callable[[Any], Any]) -> Any:
        label: Any = value[SELF]
        content: Any = value.get(VALUE)
        if value.keys() != {SELF, VALUE} or not isinstance(label, str):
            return otherwise(value)
        if label in _SCALAR_NAMES:
            return _SCALARS[_SCALAR_NAMES[label]][1](content)
        if label in _CONTAINER_NAMES:
            return _CONTAINER_NAMES[label](map(self._from_any, content))
        if label == "dict":
            return {self._from_any(key): self._from_any(each) for key, each in content}
        if label in {kind.__name__ for kind in _PLAIN}:
            return content
        kind = self._names.get(label)
        if isinstance(kind, type) and _is_record(kind):
            return self._reader(self._compile(kind))(content)
        if otherwise is not _same:
            return otherwise(value)
        raise BadEvent(f"Nothing is known of the type {label!r}.", fix="keep its class.")

    def _from_any(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            return [self._from_any(each) for each in value]
        if kind is not dict:
            return value
        if SELF in value and value.keys() == {SELF, VALUE}:
            return self._untagged(value, _same)
        return {key: self._from_any(each) for key, each in value.items()}

    # Forms of hints

    def _compile(self, hint: Any) -> _Form:
        hint = _plain_hint(hint)
        try:
            known = self._forms.get(hint)
        except TypeError:  # not hashable
            return self._new_form(hint)
        if known is None:
            # A class that has a field of its own type finds this, which looks the form up when it
            # is needed.
            self._forms[hint] = self._later(hint)
            known = self._forms[hint] = self._new_form(hint)
        return known

    def _later(self, hint: Any) -> _Form:
        return _Form(
            label=_name(hint),
            encode=lambda value: self._forms[hint].encode(value),  # noqa: PLW0108 - by then it is
            decode=lambda value: self._forms[hint].decode(value),  # noqa: PLW0108 - another form
            fits=lambda value: self._forms[hint].fits(value),  # noqa: PLW0108
            kinds=frozenset({"object", "array"}),
        )

    def _new_form(self, hint: Any) -> _Form:
        origin, arguments = get_origin(hint), get_args(hint)
        if hint is Any or hint is object or isinstance(hint, TypeVar):
            return self._untyped()
        if hint in _IDENTITY_KINDS:
            return _Form(
                label=hint.__name__,
                encode=_same,
                decode=_same,
                fits=lambda value: type(value) in _PLAIN,
                kinds=_IDENTITY_KINDS[hint],
            )
        if hint in _SCALARS:
            return self._scalar(hint)
        if origin in {Union, types.UnionType}:
            return self._union(arguments)
        if origin is Literal:
            return self._compile(Union[tuple(type(value) for value in arguments)])  # noqa: UP007
        container = hint if origin is None else origin
        if container in {list, set, frozenset} or container in _ABSTRACT_LISTS:
            return self._collection(container, arguments)
        if container in _ABSTRACT_SETS:
            return self._collection(container, arguments)
        if container is tuple:
            return self._tuple(arguments)
        if container is dict or container in _ABSTRACT_DICTS:
            return self._dict(arguments)
        if is_typeddict(container):
            return self._typed_dict(container)
        if isinstance(container, type):
            return self._class(container)
        raise self._refused(f"{_name(hint)} is a type that cannot be stored")

    def _refused(self, why: str) -> ConfigurationError:
        where = ".".join(self._path)
        return ConfigurationError(f"{where}: {why}." if where else f"{why}.", fix=f"{_ALLOWED}.")

    def _untyped(self) -> _Form:
        every = frozenset({"null", "boolean", "number", "string", "array", "object"})
        return _Form("Any", self._any, self._from_any, lambda _value: True, every, is_precise=False)

    def _scalar(self, kind: type) -> _Form:
        encode, decode, json_kind = _SCALARS[kind]
        if kind is datetime and not self._exact:
            encode = datetime.isoformat  # as SQL reads it
        return _Form(
            label=kind.__name__,
            encode=encode,
            decode=decode,
            fits=lambda value: type(value) is kind,
            kinds=frozenset({json_kind}),
        )

    def _class(self, kind: type) -> _Form:
        if issubclass(kind, Enum):
            return self._enum(kind)
        if _is_named_tuple(kind):
            return self._named_tuple(kind)
        if is_dataclass(kind):
            return self._dataclass(kind)
        if _subclasses(kind):
            return self._base_class(kind)
        raise self._refused(f"{kind.__qualname__} is no type that can be stored")

    def _enum(self, kind: type[Enum]) -> _Form:
        """By value if that is plain, otherwise by name."""
        by_value = all(type(member.value) in _PLAIN for member in kind)

        def encode(member: Any) -> Any:
            return member.value if by_value else member.name

        def decode(stored: Any) -> Any:
            return kind(stored) if by_value else kind[stored]

        json_kinds = {_json_kind(member.value) for member in kind} if by_value else {"string"}
        if issubclass(kind, Flag):
            json_kinds = {"number"}
            return _Form(
                label=kind.__name__,
                encode=lambda member: member.value,
                decode=kind,
                fits=lambda value: type(value) is kind,
                kinds=frozenset(json_kinds),
            )
        return _Form(
            label=kind.__name__,
            encode=encode,
            decode=decode,
            fits=lambda value: isinstance(value, kind),
            kinds=frozenset(json_kinds),
        )

    def _named_tuple(self, kind: Any) -> _Form:
        """As an array of its fields."""
        hints = _hints(kind)
        forms = [self._at(name, hints.get(name, Any)) for name in kind._fields]
        readers = [self._reader(form) for form in forms]

        def encode(value: Any) -> list[Any]:
            return [self._write(form, item) for form, item in zip(forms, value, strict=True)]

        def decode(stored: Any) -> Any:
            if len(stored) > len(readers):
                raise ValueError(f"{kind.__name__} has {len(readers)} fields, not {len(stored)}")
            return kind(*(read(item) for read, item in zip(readers, stored, strict=False)))

        return _Form(
            label=kind.__name__,
            encode=encode,
            decode=decode,
            fits=lambda value: type(value) is kind,
            kinds=frozenset({"array"}),
            is_precise=all(form.is_precise for form in forms),
        )

    def _at(self, name: str, hint: Any) -> _Form:
        self._path.append(name)
        try:
            return self._compile(hint)
        finally:
            self._path.pop()

    def _dataclass(self, kind: Any) -> _Form:
        """As an object of its fields. An instance of a subclass says its class."""
        hints = _hints(kind)
        if required := [
            field.name
            for field in kind.__dataclass_fields__.values()
            if (field.type is InitVar or isinstance(hints.get(field.name), InitVar))
            and field.default is MISSING
        ]:
            raise self._refused(f"{kind.__name__} needs {required[0]!r}, which it does not store")
        stored = {
            field.name: self._at(f"{kind.__name__}.{field.name}", hints[field.name])
            for field in fields(kind)
            if field.init
        }
        computed = {field.name for field in fields(kind) if not field.init}
        readers = {
            name: read for name, form in stored.items() if (read := self._reader(form)) is not _same
        }

        def encode(value: Any) -> Any:
            if type(value) is not kind:
                return {TAG: type(value).__name__, VALUE: self._compile(type(value)).encode(value)}
            return {name: self._write(form, getattr(value, name)) for name, form in stored.items()}

        def decode(content: Any) -> Any:
            if TAG in content and content.keys() == {TAG, VALUE}:
                return self._subclass(kind, content)
            if computed:
                content = {key: item for key, item in content.items() if key not in computed}
            if not readers:
                return kind(**content)
            return kind(
                **{
                    name: readers[name](item) if name in readers else item
                    for name, item in content.items()
                }
            )

        return _Form(
            label=kind.__name__,
            encode=encode,
            decode=decode,
            fits=lambda value: type(value) is kind or _is_storable_subclass(type(value), kind),
            kinds=frozenset({"object"}),
            is_precise=all(form.is_precise for form in stored.values()) and not _subclasses(kind),
        )

    def _base_class(self, kind: type) -> _Form:
        """A class that stands for its subclasses, which are dataclasses."""
        return _Form(
            label=kind.__name__,
            encode=lambda value: {
                TAG: type(value).__name__,
                VALUE: self._compile(type(value)).encode(value),
            },
            decode=lambda content: self._subclass(kind, content),
            fits=lambda value: _is_storable_subclass(type(value), kind),
            kinds=frozenset({"object"}),
            is_precise=False,
        )

    def _subclass(self, kind: type, content: dict[str, Any]) -> Any:
        named = [each for each in _subclasses(kind) if each.__name__ == content[TAG]]
        if len(named) != 1:
            raise ValueError(f"{kind.__name__} has {len(named)} subclasses called {content[TAG]!r}")
        return self._compile(named[0]).decode(content[VALUE])

    def _typed_dict(self, kind: Any) -> _Form:
        forms = {name: self._at(name, hint) for name, hint in _hints(kind).items()}
        readers = {name: self._reader(form) for name, form in forms.items()}

        def encode(value: dict[str, Any]) -> Any:
            return {
                key: self._write(forms[key], item) if key in forms else self._any(item)
                for key, item in value.items()
            }

        return _Form(
            label=kind.__name__,
            encode=encode,
            decode=lambda content: {
                key: readers.get(key, self._from_any)(item) for key, item in content.items()
            },
            fits=lambda value: type(value) is dict and _is_plain_dict(value),
            kinds=frozenset({"object"}),
            is_precise=all(form.is_precise for form in forms.values()),
        )

    def _collection(self, container: Any, arguments: tuple[Any, ...]) -> _Form:
        """Lists and sets. Of the kinds that an abstract class stands for, one is plain JSON, and
        the others say what they are.
        """
        element = self._compile(arguments[0]) if arguments else self._untyped()
        read = self._reader(element)
        plain: Any = (
            list if container in _ABSTRACT_LISTS else _ABSTRACT_SETS.get(container, container)
        )
        others: dict[str, Any] = {}
        if container in _ABSTRACT_LISTS:
            others = {"tuple": tuple}
            if container in {collections.abc.Collection, collections.abc.Iterable}:
                others |= {"set": set, "frozenset": frozenset}
        elif container is collections.abc.Set:
            others = {"set": set}
        is_ordered = {list, tuple}
        allowed = {plain, *others.values()}

        def encode(value: Any) -> Any:
            items = [self._write(element, each) for each in value]
            if type(value) not in is_ordered:
                items.sort(key=json_text)  # the same bytes, whoever writes them
            return items if type(value) is plain else {TAG: type(value).__name__, VALUE: items}

        def decode(stored: Any) -> Any:
            if type(stored) is dict and stored.keys() == {TAG, VALUE} and stored[TAG] in others:
                return others[stored[TAG]](map(read, stored[VALUE]))
            if type(stored) is not list:
                raise TypeError(f"an array was expected, not {stored!r:.80}")
            return plain(map(read, stored))

        return _Form(
            label=_name(container),
            encode=encode,
            decode=decode,
            fits=lambda value: type(value) in allowed,
            kinds=frozenset({"array"}),
            is_precise=element.is_precise and not others,
        )

    def _tuple(self, arguments: tuple[Any, ...]) -> _Form:
        if not arguments or (len(arguments) == 2 and arguments[1] is Ellipsis):
            element = self._compile(arguments[0]) if arguments else self._untyped()
            read = self._reader(element)
            return _Form(
                label="tuple",
                encode=lambda value: [self._write(element, each) for each in value],
                decode=lambda stored: tuple(map(read, stored)),
                fits=lambda value: type(value) is tuple,
                kinds=frozenset({"array"}),
                is_precise=element.is_precise,
            )
        forms = [self._compile(argument) for argument in arguments if argument != ()]
        readers = [self._reader(form) for form in forms]
        return _Form(
            label="tuple",
            encode=lambda value: [
                self._write(form, item) for form, item in zip(forms, value, strict=True)
            ],
            decode=lambda stored: tuple(
                read(item) for read, item in zip(readers, stored, strict=True)
            ),
            fits=lambda value: type(value) is tuple and len(value) == len(forms),
            kinds=frozenset({"array"}),
            is_precise=all(form.is_precise for form in forms),
        )

    def _dict(self, arguments: tuple[Any, ...]) -> _Form:
        """As an object if the keys are texts or have one; otherwise as an array of pairs."""
        key_hint = _plain_hint(arguments[0]) if arguments else str
        key = self._compile(key_hint)
        item = self._compile(arguments[1]) if arguments else self._untyped()
        read_key, read = self._reader(key), self._reader(item)
        if key_hint is str or not arguments:

            def encode(value: dict[str, Any]) -> Any:
                if not _is_plain_dict(value):
                    return self._tagged(value)
                return {name: self._write(item, each) for name, each in value.items()}

            def decode(stored: Any) -> Any:
                if SELF in stored and stored.keys() == {SELF, VALUE}:
                    return self._untagged(stored, _same)
                return {name: read(each) for name, each in stored.items()}

            return _Form(
                label="dict",
                encode=encode,
                decode=decode,
                fits=lambda value: type(value) is dict and all(type(name) is str for name in value),
                kinds=frozenset({"object"}),
                is_precise=item.is_precise,
            )
        is_text_enum = (
            isinstance(key_hint, type)
            and issubclass(key_hint, Enum)
            and all(type(member.value) is str for member in key_hint)
        )
        if key_hint in _TEXT_KEYS or is_text_enum:
            to_key = int if key_hint is int else read_key
            return _Form(
                label="dict",
                encode=lambda value: {
                    str(key.encode(name)): self._write(item, each) for name, each in value.items()
                },
                decode=lambda stored: {to_key(name): read(each) for name, each in stored.items()},
                fits=lambda value: (
                    type(value) is dict
                    and all(
                        isinstance(name, key_hint) if is_text_enum else type(name) is key_hint
                        for name in value
                    )
                ),
                kinds=frozenset({"object"}),
                is_precise=item.is_precise,
            )
        return _Form(
            label="dict",
            encode=lambda value: [
                [self._write(key, name), self._write(item, each)] for name, each in value.items()
            ],
            decode=lambda stored: {read_key(name): read(each) for name, each in stored},
            fits=lambda value: type(value) is dict,
            kinds=frozenset({"array"}),
            is_precise=key.is_precise and item.is_precise,
        )

    def _union(self, arguments: tuple[Any, ...]) -> _Form:
        """`None` and one other type need no tag. Of several, those say their type that their kind
        of JSON does not tell: plain texts, numbers and booleans come first.
        """
        members = [self._compile(each) for each in arguments if each is not type(None)]
        if len(members) == 1:
            (only,) = members
            if only.decode is _same:
                return only
            return _Form(
                label=f"{only.label} or None",
                encode=lambda value: None if value is None else only.encode(value),
                decode=lambda stored: None if stored is None else only.decode(stored),
                fits=lambda value: value is None or only.fits(value),
                kinds=only.kinds | {"null"},
                is_precise=only.is_precise,
            )
        labels = [member.label for member in members]
        if any(not member.is_precise and member.label == "Any" for member in members):
            return self._untyped()
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise self._refused(f"a union has two types called {twice[0]}, which JSON cannot tell")
        plain = [member for member in members if member.decode is _same]
        plain_kinds = {kind for member in plain for kind in member.kinds}
        tagged = {
            member.label
            for member in members
            if member.decode is not _same
            and (
                member.kinds & plain_kinds
                or any(member.kinds & other.kinds for other in members if other is not member)
            )
        }
        by_label = {member.label: member for member in members}

        def encode(value: Any) -> Any:
            if value is None:
                return None
            for member in members:
                if member.decode is _same:
                    if _is_named(value, member.label):
                        return value
                elif member.fits(value):
                    content = member.encode(value)
                    return (
                        {TAG: member.label, VALUE: content} if member.label in tagged else content
                    )
            return self._tagged(value) if self._exact else value

        def decode(stored: Any) -> Any:
            if type(stored) is dict and stored.keys() == {TAG, VALUE}:
                return by_label[stored[TAG]].decode(stored[VALUE])
            kind = _json_kind(stored)
            if kind == "null" or kind in plain_kinds:
                return stored
            untagged = [each for each in members if each.label not in tagged and kind in each.kinds]
            if untagged:
                return untagged[0].decode(stored)
            return _only_reading(stored, [each for each in members if kind in each.kinds])

        def fits(value: Any) -> bool:
            return value is None or any(
                _is_named(value, member.label) if member.decode is _same else member.fits(value)
                for member in members
            )

        return _Form(
            label=" or ".join(labels),
            encode=encode,
            decode=decode,
            fits=fits,
            kinds=frozenset().union(*(member.kinds for member in members), {"null"}),
            is_precise=False,
        )


def _is_plain_dict(value: dict[Any, Any]) -> bool:
    """Whether a dict is a JSON object that cannot be taken for a value with its type."""
    return TAG not in value and SELF not in value and all(type(key) is str for key in value)


def _is_named(value: Any, label: str) -> bool:
    return type(value) in _PLAIN and type(value).__name__ == label


def _only_reading(stored: Any, members: list[_Form]) -> Any:
    """A value that was stored without its type, by an older Headrace: the only one that it can be.
    ValueError if it can be several, or none.
    """
    readings = []
    for member in members:
        try:
            readings.append(member.decode(stored))
        except Exception:  # noqa: S112 - it is not of that type
            continue
    if len(readings) != 1:
        names = " and ".join(member.label for member in members) or "no type"
        raise ValueError(f"{stored!r:.80} can be read as {len(readings)} of {names}")
    return readings[0]


def _plain_hint(hint: Any) -> Any:
    """A hint without what does not matter to its values."""
    while True:
        origin = get_origin(hint)
        if origin is Annotated or getattr(origin, "__name__", getattr(origin, "_name", None)) in {
            "Required",
            "NotRequired",
            "ReadOnly",
            "Final",
            "ClassVar",
        }:
            hint = get_args(hint)[0]
        elif isinstance(hint, NewType):
            hint = hint.__supertype__
        elif hasattr(hint, "__value__") and not isinstance(hint, type):  # `type X = …`
            hint = hint.__value__
        elif isinstance(hint, TypeVar) and hint.__bound__ is not None:
            hint = hint.__bound__
        else:
            return type(None) if hint is None else hint


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except Exception as error:
        raise ConfigurationError(
            f"The annotations of {kind.__qualname__} cannot be resolved: {error}.",
            fix="define the classes that they name in the same module, or import them there.",
        ) from error


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, Enum) or _is_named_tuple(kind)


def _subclasses(kind: type) -> list[type]:
    """The dataclasses and NamedTuples below a class."""
    children: list[type] = type.__subclasses__(kind)
    below = [each for child in children for each in (child, *_subclasses(child))]
    return [each for each in dict.fromkeys(below) if _is_record(each)]


def _is_storable_subclass(value_kind: type, kind: type) -> bool:
    return (
        value_kind is not kind
        and issubclass(value_kind, kind)
        and [each.__name__ for each in _subclasses(kind)].count(value_kind.__name__) == 1
        and value_kind in _subclasses(kind)
    )


def module_names(thing: Any) -> Mapping[str, Any]:
    """The names of the module in which a class or a function is defined."""
    module = sys.modules.get(getattr(thing, "__module__", ""))
    return vars(module) if module is not None else {}
