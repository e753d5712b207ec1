"""One showing of the demo: the pipeline of examples/shop.py at work, with the simulated world
around it, from opening to closing; and, when it was bounded, the summary.

`headrace demo` and the cluster's test come here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, InputError, RetryError
from headrace.log import open_log
from headrace.log.api import Log
from headrace.pipeline.loader import run_file
from headrace.runtime.run import run
from headrace.runtime.services import background
from headrace.views.file import VIEWS_FILE
from headrace.views.reader import ViewReader
from shop_demo.checks import FRAUD, PIPELINE, Check, Summary
from shop_demo.world import (
    CUSTOMERS,
    DATABASE,
    ORDERS_A_SECOND,
    PRODUCTS,
    TOPICS,
    World,
    await_topics,
    clock_us,
    make_database,
)

if TYPE_CHECKING:
    from headrace.run_status import Status
    from headrace.serve.server import Server


Say = Callable[[str], None]
LOOK_EVERY_S, MISSING_EVERY_S, SHOW_EVERY_S = 0.3, 0.5, 5.0
PATIENCE_S = 120.0
"""How long a closed shop waits for something to change while outputs are missing; what is
missing then is in the summary.
"""
FIRST_NUMBER_S = 600.0
"""A showing for a while is given up if no number has moved by then."""


def shop_file() -> Path:
    """The pipeline that this package is the world of: the file next to the package."""
    return Path(__file__).parents[1] / "shop.py"


@dataclass
class Showing:
    """`home` is a directory of its own, which on a cluster all machines must see. `open_s`: for how
    long the shop is open once numbers move; None is until `stop`.
    """

    home: Path
    say: Say
    open_s: float | None = None
    log: str | None = None
    orders_a_second: float = ORDERS_A_SECOND
    on_serving: Callable[[Server], None] = lambda _server: None
    port: int | None = None
    stop: Event = field(default_factory=Event)
    spark_options: dict[str, Any] = field(default_factory=dict)
    steps_s: dict[str, float] = field(default_factory=dict)
    """How long after the beginning each step was done."""
    world: World | None = None
    is_over: bool = False
    """Whether the shop was open for as long as it should be, and closed."""

    def __post_init__(self) -> None:
        self.home = self.home.absolute()
        self.state = self.home / f"{PIPELINE}.state"
        self.address = self.log or f"file:{self.home / 'log'}"
        self._began_s = time.monotonic()

    def show(self) -> list[Check]:
        """From opening to closing. Gives the summary's lines, or none if it was stopped before."""
        self.home.mkdir(parents=True, exist_ok=True)
        with open_log(self.address) as log:
            self._refuse_a_shop_in_earnest(log)
            shop = self._made()
            with background(
                {"the demo's world": lambda done: self._direct(log, shop, done)}, self.stop
            ):
                run(
                    shop.shop,
                    log=self.address,
                    state=self.state,
                    stop=self.stop,
                    serve=True,
                    port=self.port,
                    on_serving=self._served,
                    on_status=self._runs,
                    on_alert=lambda _message: None,
                    **self.spark_options,
                )
            if not self.is_over or self.world is None:
                return []
            self.say("The second computation, from the log alone:")
            return list(Summary(log, self.state, self.home, self.world.sent).checks())

    @staticmethod
    def _refuse_a_shop_in_earnest(log: Log) -> None:
        """Invented orders do not belong among real ones."""
        taken = sorted(TOPICS & set(log.topics()))
        if taken:
            raise InputError(
                f"The log {log.address} has topics of the demo's names already:"
                f" {', '.join(taken)}.",
                fix="use a log without them; without --log the demo has one of its own.",
            )

    def _made(self) -> ModuleType:
        os.environ["SHOP_HOME"] = str(self.home)  # where the shop's file looks for the database
        make_database(self.home / DATABASE)
        self._step("made", f"customers and products in a database, a log at {self.address}")
        return run_file(shop_file())

    def _served(self, server: Server) -> None:
        self._step("served", f"the dashboard is at {server.address}; Spark starts")
        self.on_serving(server)

    def _runs(self, _status: Status) -> None:
        if "ran" not in self.steps_s:
            self._step("ran", "Spark is there, and the pipeline runs")

    def _step(self, name: str, text: str) -> None:
        self.steps_s[name] = time.monotonic() - self._began_s
        self.say(f"{self.steps_s[name]:6.1f} s  {text}")

    # The world, in a thread of its own

    def _direct(self, log: Log, shop: ModuleType, done: Event) -> None:
        if not await_topics(log, done):
            return
        self.world = World(
            log,
            shop,
            self.home,
            clock_us(),
            seed=time.time_ns(),
            orders_a_second=self.orders_a_second,
        )
        self._step(
            "opened",
            "the shop is open: devices order, search and click, banks pay, customers move, articles"
            " come out",
        )
        failed = Event()
        with background(self.world.works(), failed):
            self._stay_open(done, failed)
        if done.is_set() or failed.is_set():
            return
        self.world.close(clock_us())
        self._step("closed", "the shop is closed; what is still on its way is processed")
        self._await_outputs(log, done)
        self.is_over = not done.is_set()
        self.stop.set()

    def _stay_open(self, done: Event, failed: Event) -> None:
        """Until the time is up, which counts from the first number that moved; with a line now and
        then.
        """
        until_s = shown_s = float("inf")
        given_up_s = time.monotonic() + FIRST_NUMBER_S if self.open_s is not None else float("inf")
        while not done.wait(LOOK_EVERY_S) and not failed.is_set() and time.monotonic() < until_s:
            counted = self._counted()
            if counted and "moved" not in self.steps_s:
                self._step("moved", f"numbers move: {counted:,} orders are counted")
                shown_s = time.monotonic()
                until_s = shown_s + self.open_s if self.open_s is not None else until_s
            if "moved" not in self.steps_s and time.monotonic() > given_up_s:
                raise RetryError(
                    f"No order was counted in {FIRST_NUMBER_S:.0f} seconds.",
                    fix="look at what the pipeline says above; on a busy machine, try again.",
                )
            if time.monotonic() - shown_s >= SHOW_EVERY_S:
                shown_s = time.monotonic()
                self.say(f"{shown_s - self._began_s:6.1f} s  {self._line(counted)}")

    def _line(self, counted: int) -> str:
        assert self.world is not None
        windows = self._asked("SELECT count(*) AS n FROM revenue")
        return (
            f"{self.world.sent.orders:,} orders came in, {counted:,} are counted, {windows:,}"
            " windows emitted"
        )

    def _counted(self) -> int:
        return self._asked("SELECT coalesce(sum(orders), 0) AS n FROM sales")

    def _asked(self, query: str) -> int:
        """One number of the views; 0 as long as there are none."""
        path = self.state / VIEWS_FILE
        if not path.exists():
            return 0
        try:
            with ViewReader(path) as views:
                return int(views.sql(query).to_pylist()[0]["n"])
        except HeadraceError:  # not declared yet
            return 0

    def _await_outputs(self, log: Log, done: Event) -> None:
        """Until as much has come out as went in; whether it is right is the summary's business.
        Given up when nothing has changed for long.
        """
        before, changed_s = self._missing(log), time.monotonic()
        while (
            any(before)
            and time.monotonic() - changed_s < PATIENCE_S
            and not done.wait(MISSING_EVERY_S)
        ):
            now = self._missing(log)
            before, changed_s = now, changed_s if now == before else time.monotonic()

    def _missing(self, log: Log) -> tuple[int, ...]:
        """How many outputs are missing: orders in windows, orders in sales, searches, changes of
        the database, alerts.
        """
        assert self.world is not None
        sent, searches = self.world.sent, self.world.devices.searches.sender.rows
        in_windows, joined = (
            self._asked("SELECT coalesce(sum(orders), 0) AS n FROM revenue"),
            self._asked("SELECT coalesce(sum(searches), 0) AS n FROM click_through"),
        )
        captured = sum(
            log.read(topic, columns=["_change_type"]).to_table().num_rows
            for topic in ("customers", "products")
        )
        fired = (
            sum(row["fired"] for row in log.read("alerts", columns=["fired"]).to_pylist())
            if "alerts" in log.topics()
            else 0
        )
        changes = sent.changes + CUSTOMERS + len(PRODUCTS) - captured
        return (
            sent.orders - in_windows,
            sent.orders - self._counted(),
            searches - joined,
            changes,
            log.read(FRAUD).to_table().num_rows - fired,
        )
