"""What users write: a class that declares its output, state and timers, and reacts to rows and
timers.

    class Reminders(hr.Processor):
        output = "cart STRING, items INT"
        items = hr.state("INT", default=0)
        left = hr.timer()

`read_declaration` collects what a class declares and checks it when the step is declared, before
anything runs. The methods are called by `calls`; `context` has what they are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from headrace.errors import PlanError, nearest
from headrace.types.schema import parse_schema, to_ddl, type_name
from headrace.types.values import Misfit, column_converter

EVENT, PROCESSING = "event", "processing"
OUTPUT_COLUMN = "__output"
"""The column that says to which output an emitted row belongs, if a processor has several; null is
the main one.
"""
ROWS, ROW, ON_TIMER = "on_rows", "on_row", "on_timer"
MAX_SLOTS = 100


@dataclass(frozen=True)
class StateSlot:
    """A value that a processor keeps for each key."""

    declared_type: str
    default: Any = None
    name: str = ""

    def __set_name__(self, owner: Any, name: str) -> None:
        object.__setattr__(self, "name", name)

    @property
    def field(self) -> pa.Field:
        """The value's column; `BadSchema` if the type is none."""
        (field,) = parse_schema(f"`{self.name}` {self.declared_type}")
        return field


@dataclass(frozen=True)
class TimerSlot:
    """A time of each key at which a processor is called."""

    clock: str = EVENT
    name: str = ""

    def __set_name__(self, owner: Any, name: str) -> None:
        object.__setattr__(self, "name", name)


@dataclass(frozen=True)
class OutputSlot:
    """A further output of a processor."""

    declared_schema: str
    name: str = ""

    def __set_name__(self, owner: Any, name: str) -> None:
        object.__setattr__(self, "name", name)

    @property
    def schema(self) -> pa.Schema:
        """Its columns; `BadSchema` if the text is none."""
        return parse_schema(self.declared_schema)


def state(type: str, *, default: Any = None) -> Any:
    """Declare a value that a processor keeps for each key, as an attribute of its class.

    Values are part of the step's state: they survive crashes, follow their key when the pipeline is
    rescaled, and are restored by a replay.

    Args:
        type: The value's type, as in a schema: `"INT"`, `"ARRAY<STRING>"`, `"MAP<STRING, DOUBLE>"`.
        default: The value of a key that has none.

    Returns:
        The declaration. In the processor's methods, `ctx["name"]` reads and sets the value.

    Raises:
        PlanError: The default does not fit the type. Raised where the processor is used.

    Example:
        ```python
        class Counter(hr.Processor):
            output = "cart STRING, rows BIGINT"
            count = hr.state("BIGINT", default=0)

            def on_rows(self, rows, ctx):
                ctx["count"] = pc.add(ctx["count"], ctx.per_key(rows["cart"], "count"))
        ```
    """
    return StateSlot(type, default)


def timer(*, clock: str = EVENT) -> Any:
    """Declare a timer that a processor may set for each key, as an attribute of its class.

    A timer fires in the tick whose watermark reaches its time, after the rows of that tick. A key
    has one time for each timer; setting it again moves it, and setting it to null removes it.

    Args:
        clock: `"event"`, event time, or `"processing"`, the time of ticks. All timers of a
            processor have the same clock.

    Returns:
        The declaration. In the processor's methods, `ctx["name"]` reads and sets the time.

    Raises:
        PlanError: The clock is neither of the two.

    Example:
        ```python
        class Reminders(hr.Processor):
            output = "cart STRING"
            left = hr.timer()
        ```
    """
    if clock not in {EVENT, PROCESSING}:
        raise PlanError(
            f"A timer was declared with the clock {clock!r}.",
            fix='write hr.timer(clock="event") or hr.timer(clock="processing").',
        )
    return TimerSlot(clock)


def side_output(schema: str) -> Any:
    """Declare a further output of a processor, as an attribute of its class.

    Args:
        schema: The columns of its rows, as a schema. They include those of the key.

    Returns:
        The declaration. In the processor's methods, `ctx.emit_to("name", …)` emits a row; outside,
        `stream.side("name")` of the stream that `process` returns is a stream of these rows.

    Raises:
        BadSchema: The schema cannot be read. Raised where the processor is used.

    Example:
        ```python
        class Checked(hr.Processor, each_key=True):
            output = "cart STRING, items INT"
            odd = hr.side_output("cart STRING, reason STRING")

            def on_row(self, row, ctx):
                if row["items"] < 0:
                    ctx.emit_to("odd", cart=row["cart"], reason="fewer than none")
                else:
                    ctx.emit(cart=row["cart"], items=row["items"])
        ```
    """
    return OutputSlot(schema)


class Processor:
    """The interface of a user's own operator, given to `stream.process`.

    A subclass declares its `output`, state (`hr.state`) and timers (`hr.timer`), and has the
    methods that react to rows and timers. Each method sees keys with their state and must treat
    them independently of one another: a call may have some keys of a tick or all of them. Methods
    are pure: no wall clock (`ctx.now` is the time of the tick), no randomness but `ctx.random`, no
    network, nothing kept on `self` or outside. The same ticks then give the same rows in every
    replay and after every crash.

    Two forms:

    - By columns: `on_rows(self, rows, ctx)` gets the rows of many keys as an Arrow table, with
      state as Arrow columns, and returns an Arrow table or None. Another input `payments=` of
      `process` goes to `on_payments`. `on_timer(self, keys, ctx)` gets the keys whose timer fired.
    - By key, slower and easier: `class Reminders(hr.Processor, each_key=True)` has
      `on_row(self, row, ctx)`, called for every row, with Python values, and emits with `ctx.emit`
      or by returning dictionaries. `on_timer(self, key, ctx)` gets one key.

    Attributes:
        output: The columns of the rows that it emits, as a schema. It has the columns of the key.
        table_key: If set, the column or columns of a primary key: `process` returns a table then.
            A row that is emitted inserts its key's row or replaces it; one with a `_change_type` of
            `"delete"`, or `ctx.delete(…)`, deletes it. The key has the columns of `process`'s.
        version: If set, the processor's version: state goes on with another class of the same
            version, whatever its code.

    Example:
        ```python
        class Reminders(hr.Processor, each_key=True):
            output = "cart STRING, items INT"
            items = hr.state("INT", default=0)
            left = hr.timer()

            def on_row(self, row, ctx):
                ctx["items"] += row["items"]
                ctx["left"] = row["at"] + timedelta(hours=1)

            def on_timer(self, key, ctx):
                ctx.emit(cart=key["cart"], items=ctx["items"])

        reminders = carts.process(Reminders, key="cart")
        ```
    """

    output: ClassVar[str]
    table_key: ClassVar[str | Sequence[str] | None] = None
    version: ClassVar[str | None] = None
    each_key: ClassVar[bool] = False

    def __init_subclass__(cls, *, each_key: bool | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if each_key is not None:
            cls.each_key = each_key

    def __repr__(self) -> str:
        """The class and its settings."""
        return f"{type(self).__qualname__}({_settings_text(self)})"


@dataclass(frozen=True)
class Declaration:
    """What a processor declares: the columns of its output, its state and its timers; further
    outputs, and the primary key if its output is a table.
    """

    output: pa.Schema
    states: tuple[StateSlot, ...]
    timers: tuple[TimerSlot, ...]
    sides: tuple[OutputSlot, ...] = ()
    table_key: tuple[str, ...] = ()

    @property
    def emitted(self) -> pa.Schema:
        """The columns of all outputs side by side. With several, a row has those of its own, and
        `__output` says which that is.
        """
        if not self.sides:
            return self.output
        fields: dict[str, pa.Field] = {}
        for schema in (self.output, *(side.schema for side in self.sides)):
            for field in schema:
                fields.setdefault(field.name, pa.field(field.name, field.type))
        return pa.schema([*fields.values(), pa.field(OUTPUT_COLUMN, pa.string())])

    @property
    def clock(self) -> str | None:
        """The clock of the timers; None if there are none."""
        return self.timers[0].clock if self.timers else None

    def describe(self) -> dict[str, Any]:
        """State, timers and further outputs in plain values. They say which state fits."""
        table = {"table_key": list(self.table_key)} if self.table_key else {}
        sides = {side.name: to_ddl(side.schema) for side in self.sides}
        return {
            "state": {
                slot.name: [type_name(slot.field.type), repr(slot.default)] for slot in self.states
            },
            "timers": {slot.name: slot.clock for slot in self.timers},
            **({"side_outputs": sides} if sides else {}),
            **table,
        }


def read_declaration(processor: Processor, inputs: Iterable[str], *, where: str) -> Declaration:
    """What a processor declares.

    Args:
        processor: The processor.
        inputs: The names of the inputs besides the first one.
        where: The step, for errors.

    Raises:
        PlanError: Something that it needs is missing, or does not fit.
    """
    cls = type(processor)
    slots = _slots(cls)
    states = tuple(slot for slot in slots.values() if isinstance(slot, StateSlot))
    timers = tuple(slot for slot in slots.values() if isinstance(slot, TimerSlot))
    sides = tuple(slot for slot in slots.values() if isinstance(slot, OutputSlot))
    text = getattr(processor, "output", None)
    if not isinstance(text, str):
        raise PlanError(
            f"The step {where} uses {cls.__qualname__}, which declares no output.",
            fix='add the columns that it emits, as in output = "cart STRING, items INT".',
        )
    if len(slots) > MAX_SLOTS:
        raise PlanError(
            f"The step {where} uses {cls.__qualname__}, which declares {len(slots)} values and"
            f" timers; {MAX_SLOTS} are possible.",
            fix="gather values in one of type STRUCT or MAP.",
        )
    if len({slot.clock for slot in timers}) > 1:
        raise PlanError(
            f"The step {where} uses {cls.__qualname__}, which has timers of both clocks.",
            fix="use one clock for all timers, or two processors.",
        )
    for slot in states:
        _check_default(slot, where=f"The step {where}: {cls.__qualname__}.{slot.name}")
    _check_methods(processor, inputs, has_timers=bool(timers), where=where)
    table_key = cls.table_key or ()
    table_key = (table_key,) if isinstance(table_key, str) else tuple(table_key)
    output = parse_schema(text)
    if table_key:  # a row that is deleted has its key only
        output = pa.schema(
            [field.with_nullable(field.nullable or field.name not in table_key) for field in output]
        )
    declaration = Declaration(
        output=output,
        states=states,
        timers=timers,
        sides=sides,
        table_key=table_key,
    )
    _check_outputs(declaration, where=f"The step {where} uses {cls.__qualname__}, which")
    return declaration


def _check_outputs(declaration: Declaration, *, where: str) -> None:
    """Raise if a column has one type in one output and another in another one."""
    types: dict[str, tuple[str, pa.DataType]] = {}
    outputs = [("output", declaration.output)]
    outputs += [(side.name, side.schema) for side in declaration.sides]
    for output, schema in outputs:
        for field in schema:
            first, kind = types.setdefault(field.name.lower(), (output, field.type))
            if kind != field.type:
                raise PlanError(
                    f"{where} has the column {field.name!r} as {type_name(kind)} in {first}, and as"
                    f" {type_name(field.type)} in {output}.",
                    fix="give it one type in all outputs, or another name.",
                )


def _slots(cls: type) -> dict[str, StateSlot | TimerSlot | OutputSlot]:
    """The slots of a class and its bases, in the order of their declaration, bases first."""
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, StateSlot | TimerSlot | OutputSlot)
    }


def _check_default(slot: StateSlot, *, where: str) -> None:
    try:
        column_converter(slot.field).array([slot.default])
    except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        raise PlanError(
            f"{where} has a default that does not fit {slot.declared_type}: {error}.",
            fix="give a default of the declared type, or none.",
        ) from None


def _check_methods(
    processor: Processor, inputs: Iterable[str], *, has_timers: bool, where: str
) -> None:
    """Raise unless each input has its method, and no method waits for what never comes."""
    cls = type(processor)
    first, other = (ROW, ROWS) if cls.each_key else (ROWS, ROW)
    wanted = [first, *(f"on_{name}" for name in inputs), *([ON_TIMER] if has_timers else [])]
    if not callable(getattr(processor, first, None)) and hasattr(processor, other):
        flag = "" if cls.each_key else ", each_key=True"
        raise PlanError(
            f"The step {where} uses {cls.__qualname__}, which has {other} and not {first}.",
            fix=f"write class {cls.__name__}(hr.Processor{flag}), or rename the method.",
        )
    for name in wanted:
        if not callable(getattr(processor, name, None)):
            arguments = {ON_TIMER: "keys" if first == ROWS else "key"}.get(name, first[3:])
            raise PlanError(
                f"The step {where} uses {cls.__qualname__}, which has no method {name}.",
                fix=f"add def {name}(self, {arguments}, ctx).",
            )
    for name in vars(cls):
        if name.startswith("on_") and name not in wanted and callable(getattr(cls, name)):
            reason = (
                "no timer is declared, so on_timer is never called"
                if name == ON_TIMER
                else f"no input has that name: {nearest(name, wanted)}"
            )
            raise PlanError(
                f"The step {where} uses {cls.__qualname__}, whose method {name} is never called:"
                f" {reason}.",
                fix="declare what it is for, or rename it.",
            )


def _settings_text(processor: Processor) -> str:
    settings: Mapping[str, Any] = vars(processor)
    return ", ".join(f"{name}={value!r}" for name, value in sorted(settings.items()))
