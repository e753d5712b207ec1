"""Seats of a theatre, sold in two steps: a seat is held for some minutes, and then either paid for
or released by a timer. No seat is sold twice, however many people ask for it at once.

The commands carry the time, so the same commands always produce the same events. Run it in an empty
directory; it leaves a log in `data/`.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import headrace as hr
from headrace.events import CommandRefused, Decider, Handler, open_store

HELD_FOR = timedelta(minutes=10)


@dataclass(frozen=True)
class Hold:
    seat: str
    guest: str
    at: datetime


@dataclass(frozen=True)
class Confirm:
    seat: str
    guest: str
    at: datetime


@dataclass(frozen=True)
class Expire:
    """Sent by a timer: release the seats that were held for too long."""

    at: datetime


@dataclass(frozen=True)
class Held:
    seat: str
    guest: str
    until: datetime


@dataclass(frozen=True)
class Confirmed:
    seat: str
    guest: str


@dataclass(frozen=True)
class Expired:
    seat: str
    guest: str


@dataclass(frozen=True)
class Holding:
    guest: str
    until: datetime


@dataclass(frozen=True)
class Show:
    held: dict[str, Holding] = field(default_factory=dict)
    sold: dict[str, str] = field(default_factory=dict)


class Taken(CommandRefused):
    """Somebody else has the seat."""


def decide(command: Hold | Confirm | Expire, show: Show) -> list[Held | Confirmed | Expired]:
    if isinstance(command, Expire):
        return [
            Expired(seat, held.guest)
            for seat, held in sorted(show.held.items())
            if held.until <= command.at
        ]
    if command.seat in show.sold:
        raise Taken(f"Seat {command.seat} is sold.")
    held = show.held.get(command.seat)
    if isinstance(command, Hold):
        if held is None:
            return [Held(command.seat, command.guest, command.at + HELD_FOR)]
        if held.until > command.at:
            raise Taken(f"Seat {command.seat} is held.")
        return [
            Expired(command.seat, held.guest),
            Held(command.seat, command.guest, command.at + HELD_FOR),
        ]
    if held is None or held.guest != command.guest or held.until <= command.at:
        raise CommandRefused(f"Seat {command.seat} is not held for {command.guest}.")
    return [Confirmed(command.seat, command.guest)]


def evolve(show: Show, event: Held | Confirmed | Expired) -> Show:
    others = {seat: held for seat, held in show.held.items() if seat != event.seat}
    if isinstance(event, Held):
        return replace(show, held=others | {event.seat: Holding(event.guest, event.until)})
    if isinstance(event, Confirmed):
        return replace(show, held=others, sold=show.sold | {event.seat: event.guest})
    return replace(show, held=others)


SHOWS = Decider("show", Show(), decide, evolve, events=(Held, Confirmed, Expired))


def main() -> None:
    evening = datetime(2026, 5, 1, 18, tzinfo=UTC)
    with hr.open_log("file:data") as log, open_store(log, "theatre") as store:
        shows = Handler(store, SHOWS)

        def ask(guest: str) -> bool:
            try:
                shows.handle("hamlet", Hold("A1", guest, evening))
            except Taken:
                return False
            return True

        with ThreadPoolExecutor(8) as crowd:
            got = list(crowd.map(ask, [f"guest-{number}" for number in range(20)]))
        print("20 people asked for one seat,", sum(got), "got it")

        shows.handle("hamlet", Hold("B2", "ada", evening))
        shows.handle("hamlet", Confirm("B2", "ada", evening + timedelta(minutes=3)))
        shows.handle("hamlet", Expire(evening + HELD_FOR))
        print(
            "after ten minutes:",
            len(shows.state("hamlet").held),
            "held, sold",
            shows.state("hamlet").sold,
        )
        try:
            shows.handle("hamlet", Hold("B2", "ben", evening + timedelta(hours=1)))
        except Taken as refused:
            print("refused:", refused.reason)
        shows.handle("hamlet", Hold("A1", "ben", evening + timedelta(hours=1)))
        print("what happened:", [event.type for event in store.load("hamlet")])


if __name__ == "__main__":
    main()
