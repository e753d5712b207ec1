"""The snippets of a page about pipelines are one pipeline, that can be declared with the rows that the page says, and planned."""

from pathlib import Path
from typing import Any

from headrace.pipeline.hosting import check_hosted
from headrace.pipeline.stream import Table
from tests.test_readme import sections

DOCS = Path(__file__).parents[1] / "docs"


def declared(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for section in sections((DOCS / page).read_text()):
        for _, line, text in section.blocks:
            exec(compile("\n" * line + text, page, "exec"), names)
    return names


def test_the_joins_are_what_the_page_says() -> None:
    names = declared("joins.md")
    kinds = {name: type(names[name]).__name__ for name in ("paid", "enriched", "taxed", "corrected", "placed", "timeline", "mutual", "versions")}
    assert kinds == {
        "paid": "Stream", "enriched": "Stream", "taxed": "Stream", "corrected": "Table", "placed": "Table", "timeline": "Table", "mutual": "Table",
        "versions": "Table",
    }  # fmt: skip
    assert names["corrected"].key == ("order_id",)
    assert names["placed"].key == ("order_id",)
    assert set(names["timeline"].key) == {"post", "follower", "author"}
    assert [output.name for output in names["shop"].plan().outputs] == ["best", "taxed"]


def test_the_windows_are_what_the_page_says() -> None:
    names = declared("time.md")
    tables = {name: value for name, value in names.items() if isinstance(value, Table)}
    assert {*tables} >= {"revenue", "days", "visits", "every_minute", "hours", "metrics", "moving", "best", "weeks"}
    assert tables["weeks"].schema.names[3:] == ["revenue", "orders", "previous_revenue", "previous_orders"]
    for name, table in tables.items():
        names["shop"].view(name, table)
    check_hosted(names["shop"].plan())


def test_a_pipeline_is_tested_as_the_page_says() -> None:
    names = declared("testing.md")
    assert names["shown"] == [{"region": "eu", "n": 1}]
    assert names["waits"] == []
    assert [(row["region"], row["n"]) for row in names["told"]] == [("eu", 1)]


def test_the_captures_are_what_the_page_says() -> None:
    names = declared("cdc.md")
    assert (names["shop"].kind, names["shop"].tables, names["events"].outbox) == ("sqlite", ("customers", "orders"), "outbox")
    assert [step.captured_by for step in names["pipeline"].plan().inputs] == ["shop", "shop"]
    check_hosted(names["pipeline"].plan())


def test_the_sinks_are_what_the_page_says() -> None:
    names = declared("sinks.md")
    assert names["orders_in_reports"].kind == "sqlite"
    assert list(names["shop"].sinks) == ["revenue.sqlite"]
    check_hosted(names["shop"].plan())


def test_events_are_what_the_page_says() -> None:
    names = declared("events.md")
    try:
        assert (names["now"].balance, names["first"].balance, names["before"].balance) == (100, 100, 0)
        assert (names["current"], [event.type for event in names["history"]], len(names["everything"])) == (2, ["Opened", "Closed"], 4)
        assert (names["surname"], names["shown"], names["gone"]) == ("Lovelace", "12 St James's Square", None)
        assert names["read_my_write"] == "bank:0:1"
        assert [output.name for output in names["pipeline"].plan().outputs] == ["balances"]
        check_hosted(names["pipeline"].plan())
    finally:
        names["vault"].close()
        names["store"].close()
        names["log"].close()


def test_the_patterns_are_what_the_page_says() -> None:
    names = declared("patterns.md")
    assert names["fraud"].schema.names == ["card", "first_at", "total", "n", "matched_at"]
    assert names["steps"].schema.names == ["card", "amount", "shop", "paid_at", "classifier", "match_number", "so_far", "all", "matched_at"]
    assert names["alerts"].schema.names == ["card", "pattern", "total", "matched_at"]
    check_hosted(names["bank"].plan())


def test_the_searches_are_what_the_page_says() -> None:
    names = declared("search.md")
    assert names["alerts"].schema.names[-4:] == ["subscription", "query", "reader", "score"]
    assert names["digests"].schema.names[-1] == "matches"
    assert [row["title"] for row in names["found"]] == ["Storm at sea"]
    check_hosted(names["press"].plan())


def test_the_gateways_are_what_the_page_says() -> None:
    names = declared("gateways.md")
    assert (names["door"].kind, names["door"].topics) == ("http", ("orders", "pushes"))
    assert [(each.name, each.policy.name, each.policy.rows) for each in names["shop"].gateways.values()] == [("http.8766", "buffer", 50_000)]
    check_hosted(names["shop"].plan())


def test_the_alerts_are_what_the_page_says() -> None:
    names = declared("alerts.md")
    (alert,) = names["shop"].alerts.values()
    assert (alert.name, alert.topic, alert.every_us, len(alert.to)) == ("spike", "alert.spike", 300_000_000, 2)
    check_hosted(names["shop"].plan())
