"""The deciders of the examples, with commands as data: what is given, what is asked, what comes of
it.
"""

import importlib.util
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.errors import CommandRefused
from headrace.events import EventStore, Handler

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bank, cart, seats = (
    example("14_bank_account"),
    example("15_shopping_cart"),
    example("16_seat_reservation"),
)
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(minutes=10)


def outcomes(handler: Handler[Any], commands: list[Any]) -> list[str]:
    """For each command the types of its events, or why it was refused."""
    found = []
    for command in commands:
        try:
            found.append(
                " ".join(type(event).__name__ for event in handler.handle("it", command).events)
                or "-"
            )
        except CommandRefused as refused:
            found.append(f"{type(refused).__name__}: {refused.reason}")
    return found


CASES: list[tuple[ModuleType, str, list[Any], list[str]]] = [
    (bank, "ACCOUNTS", [bank.Deposit(1)], ["CommandRefused: There is no such account."]),
    (
        bank,
        "ACCOUNTS",
        [bank.Open("A"), bank.Open("B")],
        ["Opened", "CommandRefused: The account already belongs to A."],
    ),
    (
        bank,
        "ACCOUNTS",
        [bank.Open("A"), bank.Deposit(0), bank.Withdraw(-1)],
        ["Opened", *["CommandRefused: The amount must be positive."] * 2],
    ),
    (
        bank,
        "ACCOUNTS",
        [bank.Open("A"), bank.Deposit(5), bank.Withdraw(6), bank.Withdraw(5), bank.Withdraw(1)],
        [
            "Opened",
            "Deposited",
            "Overdrawn: The account has 5, which is less than 6.",
            "Withdrawn",
            "Overdrawn: The account has 0, which is less than 1.",
        ],
    ),
    (
        cart,
        "CARTS",
        [cart.Buy(), cart.TakeOut("x"), cart.Put("x", 0)],
        [
            "CommandRefused: The cart is empty.",
            "CommandRefused: There is no x in the cart.",
            "CommandRefused: The quantity must be at least one.",
        ],
    ),
    (
        cart,
        "CARTS",
        [cart.Put("x"), cart.Put("x"), cart.TakeOut("x"), cart.TakeOut("x")],
        ["ItemPut", "ItemPut", "ItemTakenOut", "CommandRefused: There is no x in the cart."],
    ),
    (
        cart,
        "CARTS",
        [cart.Put("x"), cart.Buy(), cart.Put("y")],
        ["ItemPut", "Bought", "CommandRefused: This cart has been bought."],
    ),
    (
        seats,
        "SHOWS",
        [seats.Hold("1", "a", NOON), seats.Hold("1", "b", NOON), seats.Hold("2", "b", NOON)],
        ["Held", "Taken: Seat 1 is held.", "Held"],
    ),
    (
        seats,
        "SHOWS",
        [seats.Hold("1", "a", NOON), seats.Confirm("1", "b", NOON), seats.Confirm("1", "a", LATER)],
        [
            "Held",
            "CommandRefused: Seat 1 is not held for b.",
            "CommandRefused: Seat 1 is not held for a.",
        ],
    ),
    (
        seats,
        "SHOWS",
        [seats.Hold("1", "a", NOON), seats.Hold("1", "b", LATER), seats.Confirm("1", "b", LATER)],
        ["Held", "Expired Held", "Confirmed"],
    ),
    (
        seats,
        "SHOWS",
        [seats.Hold("1", "a", NOON), seats.Expire(NOON), seats.Expire(LATER), seats.Expire(LATER)],
        ["Held", "-", "Expired", "-"],
    ),
    (
        seats,
        "SHOWS",
        [
            seats.Hold("1", "a", NOON),
            seats.Confirm("1", "a", NOON),
            seats.Expire(LATER),
            seats.Hold("1", "b", LATER),
        ],
        ["Held", "Confirmed", "-", "Taken: Seat 1 is sold."],
    ),
]


@pytest.mark.parametrize(("module", "decider", "commands", "expected"), CASES)
def test_commands_lead_to_what_they_should(
    store: EventStore, module: ModuleType, decider: str, commands: list[Any], expected: list[str]
) -> None:
    handler: Handler[Any] = Handler(store, getattr(module, decider))
    assert outcomes(handler, commands) == expected
    stored = [event.type for event in store.load("it")]
    assert stored == [
        word
        for outcome in expected
        if ":" not in outcome and outcome != "-"
        for word in outcome.split()
    ]
    assert Handler(store, getattr(module, decider)).state("it") == handler.state("it")
