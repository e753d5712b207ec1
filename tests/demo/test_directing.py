"""A showing of the demo, from opening to closing, without a JVM: it ends when it is stopped, at any
moment, and whatever fails in its world is its error.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from shop_demo.showing import Showing
from shop_demo.world import Bank, Office

from headrace.runtime import run as running
from headrace.serve.server import Server
from headrace.testing.plain_spark import PlainSpark


@pytest.fixture(autouse=True)
def no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_start_spark", lambda _options: PlainSpark())
    monkeypatch.setenv(
        "SHOP_HOME", "nowhere"
    )  # a showing says where, for its process: here that is undone


def shown(tmp_path: Path, said: Callable[[Showing, str], None]) -> Showing:
    """A showing that hears what it says itself."""
    showing = Showing(
        tmp_path / "shop", lambda text: said(showing, text), port=0, orders_a_second=50
    )
    assert showing.show() == []
    return showing


@pytest.mark.parametrize(
    "moment",
    ["a log at", "the dashboard is at", "the shop is open", "the pipeline runs", "numbers move"],
)
def test_it_ends_when_it_is_stopped_at_any_moment(tmp_path: Path, moment: str) -> None:
    before = threading.active_count()

    def stop_then(showing: Showing, text: str) -> None:
        if moment in text:
            showing.stop.set()

    assert not shown(tmp_path, stop_then).is_over
    assert (
        threading.active_count() <= before + 1
    )  # a thread that gives up late batches ends by itself


def test_the_dashboard_is_there_before_spark_is(tmp_path: Path) -> None:
    found = []

    def look(server: Server) -> None:
        with urlopen(f"{server.address}/dashboard/facts", timeout=30) as answer:
            found.append(json.load(answer))
        showing.stop.set()

    showing = Showing(tmp_path / "shop", lambda _text: None, port=0, on_serving=look)
    assert showing.show() == []
    assert found[0]["run"] is None
    assert {"orders", "view revenue", "with_tax_rate"} <= {
        node["id"] for node in found[0]["plan"]["nodes"]
    }


def test_a_failure_in_the_simulated_world_ends_it_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_bank: Bank, _now_us: int) -> None:
        raise RuntimeError("the bank is closed")

    monkeypatch.setattr(Bank, "step", fail)
    with pytest.raises(RuntimeError, match="the bank is closed"):
        shown(tmp_path, lambda _showing, _text: None)


def test_missing_outputs_fail_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An office that says it changed something, and did not."""
    monkeypatch.setattr("shop_demo.showing.PATIENCE_S", 1.0)

    def say_only(office: Office, _now_us: int) -> None:
        office.changes += 1

    monkeypatch.setattr(Office, "step", say_only)
    showing = Showing(tmp_path / "shop", lambda _text: None, 1.0, port=0, orders_a_second=50)
    checks = showing.show()
    wrong = {check.text.partition(":")[0] for check in checks if not check.good}
    assert "captured" in wrong
    assert not wrong & {
        "repeated",
        "transactions",
        "event sourcing",
    }  # these do not wait for the pipeline
