"""A bank: money moves between accounts, and whoever looks, whenever, finds as much of it as there
was: in one view, and between views.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import headrace as hr
from headrace.views.reader import Snapshot, ViewReader
from tests.e2e.everything import folded

ACCOUNTS, EACH = 20, 100
MONEY = ACCOUNTS * EACH


def bank(name: str = "bank") -> hr.Pipeline:
    """The total over the balances is computed from them, a stage behind; what went in and out is
    counted on its own.
    """
    pipeline = hr.Pipeline(name)
    moves = pipeline.topic(
        "moves", schema="bank STRING, account BIGINT, amount BIGINT", key="account", partitions=3
    )
    balances = moves.group_by("bank", "account").aggregate(
        balance=hr.agg.sum("amount"), moves=hr.agg.count()
    )
    pipeline.view("balances", balances)
    pipeline.view(
        "totals",
        balances.group_by("bank").aggregate(
            total=hr.agg.sum("balance"), accounts=hr.agg.count(), moves=hr.agg.sum("moves")
        ),
    )
    pipeline.view(
        "turnover", moves.group_by("bank").aggregate(net=hr.agg.sum("amount"), moves=hr.agg.count())
    )
    return pipeline


def move(account: int, amount: int) -> dict[str, Any]:
    return {"bank": "ours", "account": account, "amount": amount}


def opening() -> list[dict[str, Any]]:
    """The money that is there at first."""
    return [move(account, EACH) for account in range(ACCOUNTS)]


def transfer(rng: random.Random) -> list[dict[str, Any]]:
    """Two rows that usually lie in two partitions."""
    payer, payee = rng.sample(range(ACCOUNTS), 2)
    amount = rng.randrange(1, 50)
    return [move(payer, -amount), move(payee, amount)]


def check_moment(snap: Snapshot) -> int:
    """Everything that is shown at one moment; returns its tick."""
    balances = snap.table("balances").to_pylist()
    (total,), (turnover,) = snap.table("totals").to_pylist(), snap.table("turnover").to_pylist()
    assert snap.tick("balances") == snap.tick("totals") == snap.tick("turnover")
    assert sum(row["balance"] for row in balances) == total["total"] == turnover["net"] == MONEY
    assert sum(row["moves"] for row in balances) == total["moves"] == turnover["moves"]
    assert len(balances) == total["accounts"] == ACCOUNTS
    return snap.tick("balances")


def check_every_tick(views: Path) -> None:
    """Also those that nobody looked at: the changes of each tick leave the total as it is."""
    with ViewReader(views) as reader:
        by_tick = list(reader.changes_since("balances", 0))
        totals = {
            row["total"]
            for _, rows in reader.changes_since("totals", 0)
            for row in rows.to_pylist()
        }
    assert totals == {MONEY}
    balance = 0
    for _, rows in by_tick:
        sign = {"insert": 1, "update_postimage": 1, "update_preimage": -1, "delete": -1}
        balance += sum(sign[row["_change_type"]] * row["balance"] for row in rows.to_pylist())
        assert balance == MONEY
    assert (
        len(folded([(tick, row) for tick, rows in by_tick for row in rows.to_pylist()], "account"))
        == ACCOUNTS
    )
