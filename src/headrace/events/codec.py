"""Events as dataclasses: which class stands for which stored type and version, and how older
versions are brought up to date.

A class is stored under its name; class variables say more: `event_type` another name,
`event_version` the version of its form (1 unless given), `event_subject` the field that names the
person it is about. Fields made with `personal()` are encrypted with that person's key (`vault`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from headrace.errors import (
    BadEvent,
    BadMasterKey,
    ConfigurationError,
    HeadraceError,
    UnknownEvent,
    nearest,
)
from headrace.events.event import Event, RecordedEvent
from headrace.events.value_codec import ValueCodec, module_names

if TYPE_CHECKING:
    from headrace.events.privacy.vault import Vault


Upcaster = Callable[[dict[str, Any]], dict[str, Any]]
_PERSONAL = "headrace.personal"
_TEXTS = (str, str | None)


def personal(**options: Any) -> Any:
    """A dataclass field, a text, with something about a person. It is stored sealed, and stays so
    in states, snapshots and views: `vault.reveal` opens it, as long as there is a key.
    """
    return field(metadata={_PERSONAL: True}, **options)


def has_personal_fields(classes: Iterable[type]) -> bool:
    return any(
        _PERSONAL in each.metadata
        for kind in classes
        if is_dataclass(kind)
        for each in fields(kind)
    )


def event_type(kind: type) -> str:
    return str(getattr(kind, "event_type", kind.__name__))


def event_codec(kind: type) -> ValueCodec:
    """How instances of an event class are stored. ConfigurationError if they cannot be."""
    return ValueCodec(
        kind, exact=False, names=module_names(kind), what=f"the event {kind.__name__}"
    )


def event_version(kind: type) -> int:
    return int(getattr(kind, "event_version", 1))


class Codec:
    """Turns dataclass instances into events, and stored events into instances of what their classes
    are now.
    """

    def __init__(
        self,
        classes: Iterable[type],
        *,
        upcasters: Mapping[tuple[str, int], Upcaster] | None = None,
        vault: Vault | None = None,
    ) -> None:
        self._classes: dict[str, type] = {}
        for kind in classes:
            if not is_dataclass(kind):
                raise ConfigurationError(
                    f"The event class {kind!r} is no dataclass.",
                    fix="decorate it with @dataclass(frozen=True).",
                )
            if self._classes.setdefault(event_type(kind), kind) is not kind:
                raise ConfigurationError(
                    f"Two event classes are called {event_type(kind)!r}.",
                    fix="give one of them another event_type.",
                )
        self._upcasters = dict(upcasters or {})
        self._vault = vault
        self._personal = {
            name: [each.name for each in fields(kind) if _PERSONAL in each.metadata]
            for name, kind in self._classes.items()
        }
        self._codecs = {name: event_codec(kind) for name, kind in self._classes.items()}
        self._check_personal()

    def _check_personal(self) -> None:
        for name, hidden in self._personal.items():
            if hidden and not getattr(self._classes[name], "event_subject", None):
                raise ConfigurationError(
                    f"The event {name!r} has personal fields and does not say whose.",
                    fix='name the field with the subject: event_subject: ClassVar = "customer_id".',
                )
            hints = get_type_hints(self._classes[name])
            if odd := [each for each in hidden if hints[each] not in _TEXTS]:
                raise ConfigurationError(
                    f"The personal field {odd[0]!r} of the event {name!r} is no text.",
                    fix=(
                        "make it a str: what is stored, in states and views too, is its sealed"
                        " form."
                    ),
                )
            if hidden and self._vault is None:
                raise BadMasterKey(
                    f"The event {name!r} has personal fields ({', '.join(hidden)}), and there is no"
                    " vault to encrypt them.",
                    fix="give vault=events.open_vault(store).",
                )

    def to_event(self, thing: Any, *, id: str | None = None) -> Event:
        """An instance as an event. BadEvent if it is none of the classes, or cannot be written as
        JSON.
        """
        if isinstance(thing, Event):
            return (
                thing
                if id is None
                else Event(thing.type, thing.data, id, thing.subject, thing.type_version)
            )
        kind = type(thing)
        name = event_type(kind)
        if self._classes.get(name) is not kind:
            raise BadEvent(
                f"A {kind.__name__} is no event of this decider: {nearest(name, self._classes)}",
                fix="list its class in events=.",
            )
        subject = self._subject(thing)
        try:
            data = self._codecs[name].encode(thing)
        except BadEvent as error:
            raise BadEvent(f"The event {name!r}: {error.message}", fix=error.fix) from error
        for hidden in self._personal[name]:
            if data[hidden] is not None and self._vault is not None:
                data[hidden] = self._vault.seal(str(subject), data[hidden])
        return Event(name, data, id, subject, event_version(kind))

    def as_stored(self, event: Event) -> Any:
        """The instance as it will be read again: with its personal fields sealed, and each field as
        its annotation says.
        """
        try:
            return self._codecs[event.type].decode(event.data)
        except Exception as error:
            raise BadEvent(
                f"The event {event.type!r} would not be read back: {error}.",
                fix="correct the class: it must be made from the fields that are stored.",
            ) from error

    @staticmethod
    def _subject(thing: Any) -> str | None:
        name = getattr(type(thing), "event_subject", None)
        if name is None:
            return None
        value = getattr(thing, name, None)
        if value in {None, ""}:
            raise BadEvent(
                f"The event {type(thing).__name__!r} does not say whom it is about: its field"
                f" {name!r} is empty.",
                fix="fill it in.",
            )
        return str(value)

    def from_recorded(self, event: RecordedEvent) -> Any:
        """The instance of a stored event, brought up to date."""
        kind = self._classes.get(event.type)
        where = f"event {event.version} of {event.entity!r}"
        if kind is None:
            raise UnknownEvent(
                f"The {where} is a {event.type!r}, which no class stands for:"
                f" {nearest(event.type, self._classes)}",
                fix="list its class in events=.",
            )
        data = (
            event.data
            if event.type_version == event_version(kind)
            else self._upcast(event, event_version(kind), where)
        )
        try:
            return self._codecs[event.type].decode(data)
        except HeadraceError:
            raise
        except Exception as error:
            raise UnknownEvent(
                f"The {where}, a {event.type!r} of version {event.type_version}, does not fit its"
                f" class: {error}",
                fix="give the class its new event_version, and an upcaster from the old one.",
            ) from error

    def _upcast(self, event: RecordedEvent, target: int, where: str) -> dict[str, Any]:
        if event.type_version > target:
            raise UnknownEvent(
                f"The {where} is a {event.type!r} of version {event.type_version}; this code knows"
                f" up to {target}.",
                fix="run the newer code, which wrote it.",
            )
        data = dict(event.data)
        for version in range(event.type_version, target):
            upcaster = self._upcasters.get((event.type, version))
            if upcaster is None:
                raise UnknownEvent(
                    f"The {where} is a {event.type!r} of version {event.type_version}, the class"
                    f" has {target}, and the upcaster from {version} is missing.",
                    fix=(
                        f"add upcasters={{({event.type!r}, {version}): function}}, which makes a"
                        f" dict of version {version + 1} from one of version {version}."
                    ),
                )
            try:
                data = upcaster(data)
            except Exception as error:
                raise UnknownEvent(
                    f"The upcaster of {event.type!r} from version {version} failed at the {where}:"
                    f" {error!r}",
                    fix="correct it.",
                ) from error
        return data
