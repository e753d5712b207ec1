"""A customer whose personal data is in the vault."""

from dataclasses import dataclass, replace
from typing import ClassVar

from headrace.events import (
    Decider,
    personal,
)

KEY = bytes(range(32))


@dataclass(frozen=True)
class Registered:
    event_subject: ClassVar[str] = "customer"
    customer: int
    email: str | None = personal()
    plan: str = "free"


@dataclass(frozen=True)
class Customer:
    email: str | None = None
    plan: str = ""


CUSTOMERS = Decider(
    "customer",
    Customer(),
    lambda command, _state: [command],
    lambda state, event: replace(state, email=event.email, plan=event.plan),
    events=(Registered,),
    snapshot_every=1,
)
