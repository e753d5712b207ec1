"""Runs the command in this process, against an embedded log in a fresh directory."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli import app

ORDERS = "order_id BIGINT, customer_id BIGINT, amount DOUBLE, placed_at TIMESTAMP"


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., CommandResult]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'log'}"


@pytest.fixture
def log(address: str) -> Iterator[hr.Log]:
    with hr.open_log(address) as opened_log:
        yield opened_log


@pytest.fixture
def run(address: str) -> Run:
    """`run("topic", "list", "--json")`; `code` is the exit code expected."""

    def run_command(
        *arguments: object, stdin: str | bytes | None = None, code: int = 0
    ) -> CommandResult:
        done = CliRunner().invoke(
            app,
            [str(each) for each in arguments],
            input=stdin,
            env={"HEADRACE_LOG": address, "COLUMNS": "200"},
        )
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, (
            f"exit code {done.exit_code}, not {code}\n{done.stdout}\n{done.stderr}"
        )
        return CommandResult(done.exit_code, done.stdout, done.stderr)

    return run_command


@pytest.fixture
def orders(log: hr.Log) -> str:
    """A topic with two partitions and no rows."""
    log.create_topic("orders", ORDERS, key="customer_id", partitions=2)
    return "orders"
