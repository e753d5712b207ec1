"""The benchmark's accounts in the `eventsourcing` library: the peer of bench_events. Importing it
needs the library.
"""

from __future__ import annotations

from uuid import UUID

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event


class LibraryAccount(Aggregate):
    def __init__(self) -> None:
        self.balance = 0

    @event("Deposited")
    def deposit(self, amount: int) -> None:
        self.balance += amount


class Bank(Application[UUID]):
    def open(self, count: int) -> list[UUID]:
        accounts = [LibraryAccount() for _ in range(count)]
        self.save(*accounts)
        return [account.id for account in accounts]

    def deposit(self, account_id: UUID) -> None:
        account: LibraryAccount = self.repository.get(account_id)
        account.deposit(1)
        self.save(account)

    def with_deposits(self, count: int) -> UUID:
        """An account of so many events."""
        account = LibraryAccount()
        for _ in range(count - 1):
            account.deposit(1)
        self.save(account)
        return account.id

    def version(self, account_id: UUID) -> int:
        account: LibraryAccount = self.repository.get(account_id)
        return account.version
