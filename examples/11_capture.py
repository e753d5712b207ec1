"""Captures a database into the log: a snapshot of its rows, then its changes in whole transactions;
and a crash in between, which neither loses nor duplicates anything.

Run it in an empty directory; it leaves a database `bank.db` and a log in `data/`.
"""

import sqlite3

import headrace as hr
from headrace.cdc.base import TableChanges

ACCOUNTS = 5


def main() -> None:
    make_bank()
    bank = hr.cdc.sqlite("bank.db", log="file:data")

    bank.run(until_caught_up=True)
    show("the snapshot")

    transfer(0, 1, 30)
    transfer(1, 2, 10)
    bank.run(until_caught_up=True)
    show("after two transfers")

    transfer(2, 3, 5)
    crash(bank)
    transfer(3, 4, 1)
    bank.run(until_caught_up=True)
    show("after a crash and one more transfer")

    with hr.open_log("file:data") as log:
        changes = log.read("accounts").to_pylist()
        in_order = [
            (row["_transaction"], row["id"], row["balance"])
            for row in changes
            if row["_transaction"] is not None
        ]
    print("every change once, in order:", [(number, balance) for _, number, balance in in_order])


def make_bank() -> None:
    with sqlite3.connect("bank.db") as bank:
        bank.execute("PRAGMA journal_mode = WAL")
        bank.execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER)")
        bank.executemany(
            "INSERT INTO accounts VALUES (?, 100)", [(number,) for number in range(ACCOUNTS)]
        )
    bank.close()


def transfer(source: int, target: int, amount: int) -> None:
    with sqlite3.connect("bank.db") as bank:
        bank.execute("UPDATE accounts SET balance = balance - ? WHERE id = ?", (amount, source))
        bank.execute("UPDATE accounts SET balance = balance + ? WHERE id = ?", (amount, target))
    bank.close()


def crash(bank: hr.cdc.Capture) -> None:
    """Read the last change as a capture does, and die before the commit."""
    source = bank.open()
    with hr.open_log("file:data") as log:
        position = str(log.read("accounts").to_table()["_position"].to_pylist()[-1])
    source.start(position)
    print(
        "read and lost:",
        sum(
            item.rows.num_rows for item in source.poll(1.0).items if isinstance(item, TableChanges)
        ),
        "rows, before and after two updates",
    )
    source.close()


def show(when: str) -> None:
    with hr.open_log("file:data") as log:
        balances = {row["id"]: row["balance"] for row in hr.cdc.fold(log, "accounts").to_pylist()}
    print(
        f"{when}: {[balances[number] for number in range(ACCOUNTS)]}, total"
        f" {sum(balances.values())}"
    )


if __name__ == "__main__":
    main()
