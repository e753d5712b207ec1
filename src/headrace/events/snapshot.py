"""Snapshots: states as bytes, so that loading an entity does not fold all of its events.

A snapshot is a shortcut. One that cannot be stored, or cannot be read, is logged and counted
(`SnapshotCodec.failures`), and the state is folded from events instead: it never fails a command.
Each snapshot is read back before it is stored, so that what is stored is the state, with its types.

Format 1 had no types: states of several classes, and values in untyped containers, came back as
other things. It is read where the state's annotation tells every type, and ignored elsewhere.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, get_type_hints

from headrace.errors import BadEvent, ConfigurationError, HeadraceError
from headrace.events.value_codec import ValueCodec, json_text, module_names

S = TypeVar("S")
FORMAT = 2
_OTHER_VERSION = -1
"""What a Headrace that knows format 1 only reads as the state's version: one that it ignores."""
_UNTYPED = {type(None), bool, int, float, str, dict, list, tuple, set, frozenset}
"""Types of an initial state that say little about the states after it."""
logger = logging.getLogger("headrace.events")


def state_type(initial: Any, evolve: Callable[..., Any]) -> Any:
    """The type of a decider's states: what `evolve` says that it returns, or the type of the
    initial state if that says more than a plain value does.
    """
    try:
        declared = get_type_hints(evolve, include_extras=True).get("return", Any)
    except Exception:
        declared = Any
    if declared is Any or declared is object or isinstance(declared, TypeVar):
        return Any if type(initial) in _UNTYPED else type(initial)
    if declared is None or declared is type(None):
        return Any
    return declared


class SnapshotCodec(Generic[S]):
    """States of a decider as bytes, and back.

    Args:
        name: The decider's.
        hint: The type of its states; None to find it out.
        initial: Its initial state.
        evolve: Its function, whose module names the classes of states.
        state_version: The version of the form of its states.
        upcasters: By version of the form, what makes JSON of the next version.

    Raises:
        ConfigurationError: The initial state, or the type of states, cannot be stored.
    """

    def __init__(
        self,
        *,
        name: str,
        hint: Any,
        initial: S,
        evolve: Callable[..., Any],
        state_version: int,
        upcasters: Mapping[int, Callable[[Any], Any]],
    ) -> None:
        self._name, self._state_version, self._upcasters = name, state_version, upcasters
        names = ChainMap(getattr(evolve, "__globals__", {}), dict(module_names(type(initial))))
        chosen = state_type(initial, evolve) if hint is None else hint
        self._codec = ValueCodec(
            chosen, exact=True, names=names, what=f"the state of the decider {name!r}"
        )
        self.failures = 0
        """How many snapshots could not be stored or read."""
        self._logged: set[str] = set()
        self._guard = threading.Lock()
        try:
            self.to_json(initial)
        except BadEvent as error:
            raise ConfigurationError(
                f"The initial state of the decider {name!r} cannot be stored: {error.message}",
                fix=f"{error.fix} Or give snapshot_every=None, for no snapshots.",
            ) from error

    def to_json(self, state: S) -> Any:
        """A state as JSON that is read back as the same state. BadEvent if there is none."""
        content = self._codec.encode(state)
        try:
            again = self._codec.encode(self._codec.decode(content))
        except HeadraceError:
            raise
        except Exception as error:
            raise BadEvent(
                f"The state {state!r:.80} cannot be read back: {error!r}.",
                fix="say the type of states with Decider(state=…).",
            ) from error
        if json_text(again) != json_text(content):
            raise BadEvent(
                f"The state {state!r:.80} is read back as another one.",
                fix="say the type of states with Decider(state=…).",
            )
        return content

    def encode(self, version: int, state: S) -> bytes:
        """A snapshot of a state after a version. BadEvent if it cannot be stored."""
        content = {
            "format": FORMAT,
            "state_version": _OTHER_VERSION,
            "form": self._state_version,
            "version": version,
            "state": self.to_json(state),
        }
        return json_text(content).encode()

    def try_encode(self, entity: str, version: int, state: S) -> bytes | None:
        """A snapshot of a state; None if it cannot be stored, which is logged and counted."""
        try:
            return self.encode(version, state)
        except Exception as error:
            self._report("stored", entity, error)
            return None

    def decode(self, entity: str, content: bytes) -> tuple[int, S] | None:
        """The version and the state of a snapshot; None if it cannot be used."""
        try:
            stored = json.loads(content)
            if stored.get("format", 1) > FORMAT:
                return None
            if "format" not in stored:
                return self._decode_first_format(stored)
            state = self._upcast(stored["form"], stored["state"])
            return None if state is None else (stored["version"], self._codec.decode(state[0]))
        except Exception as error:
            self._report("read", entity, error)
            return None

    def _upcast(self, form: int, state: Any) -> tuple[Any] | None:
        """A stored state in the current form; None if it cannot be brought there."""
        for version in range(form, self._state_version):
            if version not in self._upcasters:
                return None
            state = self._upcasters[version](state)
        return (state,) if form <= self._state_version else None

    def _decode_first_format(self, stored: dict[str, Any]) -> tuple[int, S] | None:
        if stored["state_version"] != self._state_version or not self._codec.is_precise:
            return None
        try:
            state = self._codec.decode(stored["state"])
            is_same = json_text(self._codec.encode(state)) == json_text(stored["state"])
        except Exception:
            return None
        return (stored["version"], state) if is_same else None

    def _report(self, what: str, entity: str, error: Exception) -> None:
        """Count a failure, and log the first of its kind."""
        reason = error.message if isinstance(error, HeadraceError) else repr(error)
        fix = error.fix if isinstance(error, HeadraceError) else ""
        with self._guard:
            self.failures += 1
            kind = f"{what} {type(error).__name__}"
            if kind in self._logged:
                return
            self._logged.add(kind)
        logger.warning(
            "A snapshot of %r for the decider %r could not be %s, and its state is folded from"
            " events: %s %s Further ones are only counted.",
            entity,
            self._name,
            what,
            reason,
            fix,
        )
