"""An event-sourced shopping cart: its history includes items that were put in and taken out again
before the purchase, and a second reader lists what customers hesitated over.

The first carts had no quantities: an upcaster converts their events to the current version. Run it
in an empty directory; it leaves a log in `data/`.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import headrace as hr
from headrace.events import CommandRefused, Decider, Event, EventStore, Handler, open_store


@dataclass(frozen=True)
class Put:
    item: str
    quantity: int = 1


@dataclass(frozen=True)
class TakeOut:
    item: str


@dataclass(frozen=True)
class Buy:
    pass


@dataclass(frozen=True)
class ItemPut:
    event_version: ClassVar[int] = 2
    item: str
    quantity: int


@dataclass(frozen=True)
class ItemTakenOut:
    item: str


@dataclass(frozen=True)
class Bought:
    items: dict[str, int]


@dataclass(frozen=True)
class Cart:
    items: dict[str, int]
    is_bought: bool = False


def decide(command: Put | TakeOut | Buy, cart: Cart) -> list[ItemPut | ItemTakenOut | Bought]:
    if cart.is_bought:
        raise CommandRefused("This cart has been bought.")
    if isinstance(command, Put):
        if command.quantity < 1:
            raise CommandRefused("The quantity must be at least one.")
        return [ItemPut(command.item, command.quantity)]
    if isinstance(command, TakeOut):
        if command.item not in cart.items:
            raise CommandRefused(f"There is no {command.item} in the cart.")
        return [ItemTakenOut(command.item)]
    if not cart.items:
        raise CommandRefused("The cart is empty.")
    return [Bought(cart.items)]


def evolve(cart: Cart, event: ItemPut | ItemTakenOut | Bought) -> Cart:
    if isinstance(event, ItemPut):
        return replace(
            cart, items=cart.items | {event.item: cart.items.get(event.item, 0) + event.quantity}
        )
    if isinstance(event, ItemTakenOut):
        return replace(
            cart,
            items={item: quantity for item, quantity in cart.items.items() if item != event.item},
        )
    return replace(cart, is_bought=True)


def with_quantity(old: dict[str, Any]) -> dict[str, Any]:
    return old | {"quantity": 1}


CARTS = Decider(
    "cart",
    Cart({}),
    decide,
    evolve,
    events=(ItemPut, ItemTakenOut, Bought),
    upcasters={("ItemPut", 1): with_quantity},
)


def abandoned(store: EventStore) -> Counter[str]:
    """How often each item was taken out of a cart, or left in a cart that was not bought."""
    counts: Counter[str] = Counter()
    in_carts: dict[str, set[str]] = {}
    for event in store.read():
        if event.type == "ItemPut":
            in_carts.setdefault(event.entity, set()).add(event.data["item"])
        elif event.type == "ItemTakenOut":
            counts[event.data["item"]] += 1
            in_carts[event.entity].discard(event.data["item"])
        else:
            del in_carts[event.entity]
    counts.update(item for items in in_carts.values() for item in items)
    return counts


def main() -> None:
    with hr.open_log("file:data") as log, open_store(log, "carts") as store:
        # An event of version 1, written years ago.
        store.append("cart-0", Event("ItemPut", {"item": "rope"}))
        carts = Handler(store, CARTS)
        for cart, command in [
            ("cart-1", Put("lamp")),
            ("cart-1", Put("boots", 2)),
            ("cart-1", TakeOut("lamp")),
            ("cart-1", Buy()),
            ("cart-2", Put("lamp")),
            ("cart-2", Put("rope")),
        ]:
            carts.handle(cart, command)
        print("bought:", carts.state("cart-1").items)
        print("the old cart:", carts.state("cart-0").items)
        print(
            "cart 1:",
            [(event.version, event.type, event.data.get("item")) for event in store.load("cart-1")],
        )
        print("hesitated over:", sorted(abandoned(store).items()))


if __name__ == "__main__":
    main()
