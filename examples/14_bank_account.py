"""An event-sourced bank account: each command is decided against the account's state, a refused
command stores no event, and every past balance can be computed.

Run it in an empty directory; it leaves a log in `data/`.
"""

from dataclasses import dataclass, replace

import headrace as hr
from headrace.events import Change, CommandRefused, Decider, Handler, VersionConflict, open_store


@dataclass(frozen=True)
class Open:
    owner: str


@dataclass(frozen=True)
class Deposit:
    amount: int


@dataclass(frozen=True)
class Withdraw:
    amount: int


@dataclass(frozen=True)
class Opened:
    owner: str


@dataclass(frozen=True)
class Deposited:
    amount: int


@dataclass(frozen=True)
class Withdrawn:
    amount: int


@dataclass(frozen=True)
class Account:
    owner: str | None = None
    balance: int = 0


class Overdrawn(CommandRefused):
    """The account's balance is less than the amount."""


def decide(
    command: Open | Deposit | Withdraw, account: Account
) -> list[Opened | Deposited | Withdrawn]:
    if isinstance(command, Open):
        if account.owner is not None:
            raise CommandRefused(f"The account already belongs to {account.owner}.")
        return [Opened(command.owner)]
    if account.owner is None:
        raise CommandRefused("There is no such account.")
    if command.amount <= 0:
        raise CommandRefused("The amount must be positive.")
    if isinstance(command, Deposit):
        return [Deposited(command.amount)]
    if command.amount > account.balance:
        raise Overdrawn(f"The account has {account.balance}, which is less than {command.amount}.")
    return [Withdrawn(command.amount)]


def evolve(account: Account, event: Opened | Deposited | Withdrawn) -> Account:
    if isinstance(event, Opened):
        return replace(account, owner=event.owner)
    change = event.amount if isinstance(event, Deposited) else -event.amount
    return replace(account, balance=account.balance + change)


ACCOUNTS = Decider("account", Account(), decide, evolve, events=(Opened, Deposited, Withdrawn))


def transfer(accounts: Handler[Account], source: str, target: str, amount: int) -> None:
    """Change two accounts in one commit: both, or neither."""
    while True:
        (taken_at, taken), (given_at, given) = (
            accounts.versioned_state(source),
            accounts.versioned_state(target),
        )
        out = [accounts.codec.to_event(event) for event in decide(Withdraw(amount), taken)]
        back = [accounts.codec.to_event(event) for event in decide(Deposit(amount), given)]
        try:
            accounts.store.commit([Change(source, out, taken_at), Change(target, back, given_at)])
        except VersionConflict:
            continue
        return


def main() -> None:
    with hr.open_log("file:data") as log, open_store(log, "bank") as store:
        accounts = Handler(store, ACCOUNTS)
        accounts.handle("ada", Open("Ada"))
        accounts.handle("ben", Open("Ben"))
        accounts.handle("ada", Deposit(100), id="payday-1")
        # The network was slow, and the client sends the command again.
        accounts.handle("ada", Deposit(100), id="payday-1")
        try:
            accounts.handle("ada", Withdraw(500))
        except Overdrawn as refused:
            print("refused:", refused.reason)
        transfer(accounts, "ada", "ben", 30)
        print("ada has", accounts.state("ada").balance, "and ben", accounts.state("ben").balance)
        print(
            "ada's balances:",
            [
                accounts.state("ada", version=version).balance
                for version in range(1, store.version("ada") + 1)
            ],
        )
        print("in order:", [(event.entity, event.type) for event in store.read()])


if __name__ == "__main__":
    main()
