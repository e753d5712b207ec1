"""The dashboard: its measurements are those of the pipeline, its page requests nothing from
elsewhere, and in a real browser everything it shows updates.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.cli.commands.pipeline.top import render
from headrace.errors import ConfigurationError
from headrace.plan.rendering import write_plan
from headrace.run_status import check_state, log_address
from headrace.serve import dashboard as board
from headrace.serve.dashboard import (
    SAMPLE_EVERY_S,
    Dashboard,
    DashboardSample,
    rate_span,
)
from headrace.serve.server import PORT, Server, start, start_at_usual_port
from headrace.testing.pipelines import PipelineTest
from tests.serve.conftest import Client

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SHOTS = Path(__file__).parents[2] / "build" / "screenshots"


def shop() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    times = hr.EventTime("placed_at", delay="5 seconds", producer="till")
    orders = pipeline.topic(
        "orders",
        schema="order_id BIGINT, region STRING, amount DOUBLE, till STRING, placed_at TIMESTAMP",
        key="region",
        event_time=times,
    )
    pipeline.write("big_orders", orders.where("amount >= 100").select("order_id", "region"))
    minutes = (
        orders.window(hr.tumbling("1 minute"), late=hr.late.correct("1 hour"))
        .group_by("region")
        .aggregate(orders=hr.agg.count(), revenue=hr.agg.sum("amount"))
    )
    pipeline.view("minutes", minutes)
    totals = orders.group_by("region").aggregate(
        smallest=hr.agg.min("amount"), revenue=hr.agg.sum("amount")
    )
    pipeline.view(
        "places", totals.top(3, by="revenue").select("region", "smallest", turnover="revenue")
    )
    rising = orders.match(
        "a b",
        define={"b": "amount > a.amount"},
        measures={"total": "sum(amount)"},
        within="1 minute",
    )
    pipeline.write("rising", rising)
    return pipeline


def order(
    number: int, amount: float, seconds: float, region: str | None = "north"
) -> dict[str, Any]:
    return {
        "order_id": number,
        "region": region,
        "amount": amount,
        "till": "t1",
        "placed_at": START + timedelta(seconds=seconds),
    }


@pytest.fixture(autouse=True)
def sizes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "SIZES_EVERY_S", 0.5)


class Shown:
    """A pipeline under test, and a server of its dashboard."""

    def __init__(self, test: PipelineTest, server: Server) -> None:
        self.test, self.server = test, server

    def batch(self, *rows: dict[str, Any]) -> None:
        self.test.feed("orders", list(rows))
        self.test.settle()
        self.test.runner.write_status()


@contextmanager
def showing(root: Path) -> Iterator[Shown]:
    with PipelineTest(shop(), root) as test:
        write_plan(test.state, test.pipeline.plan(), test.pipeline.sinks, test.log.address)
        test.runner.write_status()
        with start(test.state, test.log, 0) as server:
            yield Shown(test, server)


def test_the_figures_are_those_of_the_pipeline(tmp_path: Path) -> None:
    with showing(tmp_path) as shown:
        client = Client(shown.server.port)
        shown.batch(
            order(1, 50.0, 0),
            order(2, 150.0, 10),
            order(3, 20.0, 100),
            {**order(4, 1.0, 20), "placed_at": None},
        )
        time.sleep(max(SAMPLE_EVERY_S, board.SIZES_EVERY_S))
        measurements = client.get("/dashboard/facts").json
        kinds = {node["id"]: node["kind"] for node in measurements["plan"]["nodes"]}
        assert kinds["orders"] == "topic"
        assert kinds["minutes.window"] == "window"
        assert kinds["view minutes"] == "view"
        assert kinds["write rising"] == "written"
        inputs = {node["id"]: node["inputs"] for node in measurements["plan"]["nodes"]}
        assert inputs["view minutes"] == ["minutes.window"]
        orders = {
            node["id"]: node.get("order")
            for node in measurements["plan"]["nodes"]
            if node["kind"] == "view"
        }
        assert orders == {
            "view minutes": None,
            "view places": [["turnover", True]],
        }, "by the names of the view's own columns"
        assert all(given in kinds for each in inputs.values() for given in each), (
            "every edge has two ends"
        )
        assert (
            measurements["run"]["pipeline"],
            measurements["run"]["is_running"],
            measurements["run"]["rows_behind"],
        ) == ("shop", True, 0)
        assert {topic["name"]: topic["end"] for topic in measurements["topics"]}["orders"] == 4
        assert measurements["run"]["watermarks"]["orders"]["held_back_by"][0]["producer"] == "t1"
        assert measurements["run"]["counts"]["minutes.window.windows_waiting"] == 1
        assert measurements["state"]["minutes.window"] > 0
        assert {each["of"]: each["rows"] for each in measurements["dead"]} == {
            "orders": 1,
        }


def test_rows_that_came_late_and_rows_that_came_too_late_are_counted_apart(tmp_path: Path) -> None:
    with showing(tmp_path) as shown:
        shown.batch(order(1, 50.0, 0), order(2, 20.0, 100))
        shown.batch(order(3, 7.0, 30), order(4, 8.0, 40), order(5, 1.0, 101))
        shown.batch(order(6, 1.0, 4000))
        shown.batch(order(7, 1.0, 10))
        counts = Dashboard(shown.test.state, shown.test.log).measurements()["run"]["counts"]
        assert (counts["minutes.window.corrected"], counts["minutes.window.late"]) == (2, 1)


def test_the_past_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serve.dashboard.SAMPLE_EVERY_S", 0.0)
    with showing(tmp_path) as shown:
        looking = Dashboard(shown.test.state, shown.test.log)
        for _ in range(650):
            looking.sample()
        assert len(looking.measurements()["series"]["at"]) == 600


def test_the_page_may_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    with showing(tmp_path) as shown:
        client = Client(shown.server.port)
        for path, kind in (
            ("/", "text/html"),
            ("/board.js", "text/javascript"),
            ("/drawing.js", "text/javascript"),
            ("/board.css", "text/css"),
            ("/icon.svg", "image/svg+xml"),
        ):
            answer = client.get(path)
            assert answer.status == 200
            assert answer.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert b"http://" not in answer.body.replace(b"http://www.w3.org", b"")
            assert b"https://" not in answer.body


def test_with_a_token_the_page_is_open_and_the_figures_are_not(tmp_path: Path) -> None:
    with (
        PipelineTest(shop(), tmp_path) as test,
        start(test.state, test.log, 0, token="a-long-enough-token") as server,
    ):
        client = Client(server.port)
        assert client.get("/").status == 200
        assert client.get("/dashboard/facts").status == 401
        assert client.ask("POST", "/dead/orders/replay").status == 401
        assert (
            client.get(
                "/dashboard/facts", headers={"Authorization": "Bearer a-long-enough-token"}
            ).status
            == 200
        )


def test_a_page_of_another_origin_cannot_replay_dead_letters(tmp_path: Path) -> None:
    with showing(tmp_path) as shown:
        answer = Client(shown.server.port).ask(
            "POST",
            "/dead/orders/replay",
            headers={"Origin": "http://elsewhere.example", "Sec-Fetch-Site": "cross-site"},
        )
        assert answer.status == 403


def test_a_port_that_is_taken_is_stepped_over(tmp_path: Path) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        with (
            start_at_usual_port(test.state, test.log, None, token=None) as one,
            start_at_usual_port(test.state, test.log, None, token=None) as other,
        ):
            assert PORT <= one.port < other.port < PORT + 10
        with pytest.raises(ConfigurationError, match="No pipeline has run"):
            check_state(tmp_path / "nowhere")
        assert log_address(tmp_path / "nowhere") is None


def on_screen(measurements: dict[str, Any], width: int, height: int) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(measurements, width, height))
    return console.export_text()


def test_top_shows_the_same_and_says_when_there_is_no_room(tmp_path: Path) -> None:
    with showing(tmp_path) as shown:
        shown.batch(order(1, 50.0, 0), order(2, 150.0, 100))
        measurements = Dashboard(shown.test.state, shown.test.log, count_views=True).measurements()
        printed = on_screen(measurements, 120, 40)
        assert "running" in printed
        assert "minutes.window" in printed
        assert "t1" in printed
        assert re.search(r"^view +rows *$", printed, re.MULTILINE)
        assert re.search(r"^minutes +1 *$", printed, re.MULTILINE)
        assert "too small" in on_screen(measurements, 40, 5)
        assert "has not run yet" in on_screen({**measurements, "run": None}, 120, 40)


def test_top_uses_the_room_there_is_and_says_what_is_hidden(tmp_path: Path) -> None:
    with showing(tmp_path) as shown:
        measurements = Dashboard(shown.test.state, shown.test.log).measurements()
    topics = [
        {"name": f"topic{at:02}", "rows_per_second": 0.0, "end": at, "bytes": 10}
        for at in reversed(range(30))
    ]
    counts = {
        f"a_step_with_quite_a_long_name_{at:02}.aggregate.rows_in": 1_000_000 for at in range(12)
    }
    printed = on_screen(
        {
            **measurements,
            "topics": topics,
            "run": {**measurements["run"], "counts": counts},
            "groups": {"others": 7},
        },
        80,
        24,
    )
    lines = printed.rstrip("\n").splitlines()
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    hidden = sum(int(count) for count in re.findall(r"… (\d+) more", printed))
    assert len(re.findall(r"^topic\d\d|^a_step", printed, re.MULTILINE)) + hidden == 42
    assert [line[:7] for line in lines if re.match(r"topic\d", line)][:3] == [
        "topic00",
        "topic01",
        "topic02",
    ], "ties by name"
    assert "others" in on_screen({**measurements, "groups": {"others": 7}}, 80, 24)


def test_rates_are_taken_over_some_batches() -> None:
    def sample(at: int, tick: int) -> DashboardSample:
        return DashboardSample(
            at=float(at),
            tick=tick,
            counts={"step.rows_in": 100 * tick},
            ends={},
            rows_behind=0,
            lag={},
            watermark_us={},
        )

    quick = [sample(at, at) for at in range(60)]
    assert [each.at for each in rate_span(quick)] == [54.0, 59.0]
    slow = [sample(at, at // 6) for at in range(60)]
    before, now = rate_span(slow)
    assert now.counts["step.rows_in"] > before.counts["step.rows_in"], (
        "though most looks see no new batch"
    )
    assert now.at - before.at <= 20
    idle = [sample(at, min(at, 30)) for at in range(60)]
    assert rate_span(idle)[0].tick == rate_span(idle)[1].tick, "nothing has come for long"


# In a browser


@pytest.fixture
def chromium() -> Iterator[Any]:
    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if program is None:
        pytest.skip("There is no Chromium here. To fix: apt-get install chromium.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_in_a_browser_everything_moves(tmp_path: Path, chromium: Any) -> None:
    problems, asked = list[str](), set[str]()
    with showing(tmp_path) as shown:
        shown.batch(
            order(1, 50.0, 0),
            order(2, 150.0, 10),
            order(3, 20.0, 100),
            {**order(4, 1.0, 20), "placed_at": None},
        )
        page = chromium.new_page(viewport={"width": 1366, "height": 768})
        page.set_default_timeout(90_000)  # on a machine that is busy
        page.on(
            "console",
            lambda message: (
                problems.append(message.text) if message.type in {"error", "warning"} else None
            ),
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.add(request.url.split("/")[2]))
        place = f"127.0.0.1:{shown.server.port}"
        page.goto(shown.server.address)
        page.wait_for_selector("g.node:has-text('minutes.window')")
        assert page.locator("g.node").count() == len(shown.test.pipeline.plan().steps()) + len(
            shown.test.pipeline.plan().outputs
        )
        tick = page.locator("#figures dd").first.inner_text()
        shown.batch(order(5, 30.0, 101))
        page.wait_for_function(
            "before => document.querySelector('#figures dd').textContent !== before", arg=tick
        )
        page.locator("g.node:has-text('minutes.window')").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("text=waits for event time")
        _shot(page, "pipeline")

        page.click("#tab-views")
        page.wait_for_selector("#live td:text-is('200')")
        shown.batch(order(6, 7.0, 30))  # late: a correction
        page.wait_for_selector("tr.corrected td:text-is('207')")
        assert page.locator("#live figcaption").inner_text() == "revenue", (
            "the last number, which is an aggregate"
        )
        _shot(page, "views")

        _check_leaderboard(page, shown)

        page.click("#tab-dead")
        page.wait_for_selector("#panel td:text-is('orders')")
        page.click("button[aria-label='Replay the dead letters of orders']")
        page.wait_for_function("() => document.getElementById('replayed').textContent !== ''")
        _shot(page, "dead letters")

        page.click("#tab-sql")
        page.fill("#query", "SELECT region, revenue FROM minutes")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#answer td:text-is('207')")
        page.fill("#query", "SELECT nothing FROM nowhere")
        page.click("#run")
        page.wait_for_selector("#answer pre.bad")
        heads = {tab: _heads(page, tab) for tab in ("topics", "time", "matches")}
        assert "offsets" in heads["topics"]
        assert {"late rows used", "rows too late"} <= heads["time"]
        assert "total" in heads["matches"]
        assert not {"_partition", "_offset"} & heads["matches"]
        page.keyboard.press("Escape")
        page.locator("#tab-matches").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#tab-dead").get_attribute("aria-selected") == "true"
    assert [each for each in problems if "400" not in each and "404" not in each] == [], (
        "but for the query that was wrong"
    )
    assert asked == {place}, "no request leaves the machine"


def _check_leaderboard(page: Any, shown: Shown) -> None:
    shown.batch(order(7, 9.0, 102, region="east"), order(8, 900.0, 103, region="west"))
    page.click("button:text-is('places')")
    page.wait_for_selector("#live td:text-is('900')")
    assert page.locator("#live tbody td:first-child").all_inner_texts() == [
        "west",
        "north",
        "east",
    ], "in its order, and not in that of its key"
    assert page.locator("#live figcaption").inner_text() == "turnover"
    assert page.locator("#live svg g text:first-child").all_text_contents() == [
        "west",
        "north",
        "east",
    ]
    _shot(page, "leaderboard")


def _heads(page: Any, tab: str) -> set[str]:
    """The headings of a tab's tables."""
    page.click(f"#tab-{tab}")
    page.wait_for_selector("main table")
    _shot(page, tab)
    return set(page.locator("main th").all_inner_texts())


def _shot(page: Any, name: str) -> None:
    """Kept for people to look at."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def test_seven_columns_fit_a_small_screen_and_edges_pass_no_box(
    chromium: Any, tmp_path: Path
) -> None:
    with showing(tmp_path) as shown:
        chain = [
            {
                "id": f"n{at}",
                "kind": "select",
                "label": f"a step with a long name {at}",
                "inputs": [f"n{at - 1}"] if at else [],
            }
            for at in range(7)
        ]
        chain[6]["inputs"] = ["n5", "n0", "n2"]
        path = shown.test.state / "plan.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "nodes": chain}))
        page = chromium.new_page(viewport={"width": 1366, "height": 768})
        page.goto(shown.server.address)
        page.wait_for_selector("g.node")
        assert (
            page.evaluate(
                "() => { const graph = document.querySelector('#panel .scroll'); return"
                " graph.scrollWidth - graph.clientWidth; }"
            )
            == 0
        )
        assert page.locator("path.edge").count() == 8
        assert page.evaluate(_CROSSED) == 0
        page.close()


_CROSSED = """() => {
  const boxes = [...document.querySelectorAll('g.node')].map((node) => {
    const at = node.transform.baseVal[0].matrix, box = node.querySelector('rect').getBBox();
    return [at.e + 1, at.f, at.e + box.width - 1, at.f + box.height];
  });
  let crossed = 0;
  for (const edge of document.querySelectorAll('path.edge')) {
    for (let at = 0; at < edge.getTotalLength(); at += 2) {
      const { x, y } = edge.getPointAtLength(at);
      crossed += boxes.some(
        ([left, top, right, bottom]) => x > left && x < right && y > top && y < bottom
      );
    }
  }
  return crossed;
}"""


def test_colours_are_distinct_in_light_and_dark(chromium: Any, tmp_path: Path) -> None:
    """The contrast of every text with what is behind it: at least 4.5 to 1, as WCAG AA asks."""
    with showing(tmp_path) as shown:
        shown.batch(order(1, 50.0, 0), order(2, 150.0, 100))
        for scheme in ("light", "dark"):
            page = chromium.new_page(color_scheme=scheme)
            page.goto(shown.server.address)
            page.wait_for_selector("g.node")
            worst = page.evaluate(_CONTRAST)
            assert worst["ratio"] >= 4.5, (scheme, worst)
            page.close()


def test_pages_have_no_accessibility_violations(chromium: Any, tmp_path: Path) -> None:
    """What axe-core finds on each tab: names of controls, roles, order of headings, contrast, and
    the rest of WCAG that a program can see.
    """
    from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]

    with showing(tmp_path) as shown:
        shown.batch(
            order(1, 50.0, 0),
            order(2, 150.0, 10),
            order(3, 20.0, 100),
            {**order(4, 1.0, 20), "placed_at": None},
        )
        for scheme in ("light", "dark"):
            page = chromium.new_context(
                color_scheme=scheme, bypass_csp=True
            ).new_page()  # the checker is a script of its own
            page.goto(shown.server.address)
            page.wait_for_selector("g.node")
            tabs = page.locator("[role=tab]").evaluate_all("all => all.map(each => each.id)")
            assert len(tabs) >= 7
            for tab in tabs:
                page.click(f"#{tab}")
                page.wait_for_selector("#panel > *")
                found = Axe().run(page)
                assert found.violations_count == 0, f"{scheme}, {tab}: {found.generate_report()}"
            page.close()


_CONTRAST = """() => {
  const numbers = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (v) => v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  let worst = { ratio: 99 };
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length) continue;
    const isSvg = e instanceof SVGElement, style = getComputedStyle(e);
    const ink = numbers(isSvg ? style.fill : style.color);
    const box = isSvg ? e.closest('g.node')?.querySelector('rect') : null;
    const paper = box ? numbers(getComputedStyle(box).fill) : behind(e);
    const [a, b] = [light(ink), light(paper)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst.ratio) worst = { ratio, text: e.textContent.slice(0, 40) };
  }
  return worst;
}"""


def test_the_plan_file_is_plain_json(tmp_path: Path) -> None:
    with showing(tmp_path) as shown:
        printed = json.loads((shown.test.state / "plan.json").read_text())
        assert (printed["version"], printed["pipeline"], printed["log"]) == (
            1,
            "shop",
            shown.test.log.address,
        )
