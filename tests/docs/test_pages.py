"""Every snippet of the guide runs, a page at a time; here the pages that need nothing but Python.
Some pages are looked at more closely.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.pipeline.stream import Table
from tests.docs.pages import DOCS, KAFKA, NEEDS_A_CLUSTER, POSTGRES, pages, run_page
from tests.docs.snippets import snippets


def the_joins_are_what_the_page_says(names: dict[str, Any]) -> None:
    kinds = {
        name: type(names[name]).__name__
        for name in (
            "paid",
            "enriched",
            "taxed",
            "corrected",
            "placed",
            "timeline",
            "mutual",
            "versions",
        )
    }
    assert kinds == {
        "paid": "Stream",
        "enriched": "Stream",
        "taxed": "Stream",
        "corrected": "Table",
        "placed": "Table",
        "timeline": "Table",
        "mutual": "Table",
        "versions": "Table",
    }
    assert names["corrected"].key == ("order_id",)
    assert names["placed"].key == ("order_id",)
    assert set(names["timeline"].key) == {"post", "follower", "author"}
    assert [output.name for output in names["shop"].plan().outputs] == [
        "winners",
        "best",
        "taxed",
        "dearest",
    ]


def the_windows_are_what_the_page_says(names: dict[str, Any]) -> None:
    tables = {name: value for name, value in names.items() if isinstance(value, Table)}
    assert {*tables} >= {
        "revenue",
        "days",
        "visits",
        "every_minute",
        "hours",
        "metrics",
        "moving",
        "best",
        "weeks",
    }
    assert tables["weeks"].schema.names[3:] == [
        "revenue",
        "orders",
        "previous_revenue",
        "previous_orders",
    ]
    for name in tables.keys() - {output.name for output in names["shop"].plan().outputs}:
        names["shop"].view(name, tables[name])
    names["shop"].plan().check_kernels()


def a_pipeline_is_tested_as_the_page_says(names: dict[str, Any]) -> None:
    assert names["shown"] == [{"region": "eu", "n": 1}]
    assert names["waits"] == []
    assert [(row["region"], row["n"]) for row in names["emitted"]] == [("eu", 1)]


def the_captures_are_what_the_page_says(names: dict[str, Any]) -> None:
    assert (names["shop"].kind, names["shop"].tables, names["events"].outbox) == (
        "sqlite",
        ("customers", "orders"),
        "outbox",
    )
    assert [step.captured_by for step in names["pipeline"].plan().inputs] == ["shop", "shop"]
    names["pipeline"].plan().check_kernels()


def the_sinks_are_what_the_page_says(names: dict[str, Any]) -> None:
    assert names["orders_in_reports"].kind == "sqlite"
    assert list(names["shop"].sinks) == ["revenue.sqlite"]
    names["shop"].plan().check_kernels()


def events_are_what_the_page_says(names: dict[str, Any]) -> None:
    assert (names["now"].balance, names["first"].balance, names["before"].balance) == (100, 100, 0)
    assert (
        names["current"],
        [event.type for event in names["history"]],
        len(names["everything"]),
    ) == (2, ["Opened", "Closed"], 4)
    assert names["surname"] == "Lovelace"
    assert names["read_my_write"] == "bank:0:1"
    assert [output.name for output in names["pipeline"].plan().outputs] == ["balances"]
    names["pipeline"].plan().check_kernels()


def the_patterns_are_what_the_page_says(names: dict[str, Any]) -> None:
    assert names["fraud"].schema.names == ["card", "first_at", "total", "n", "matched_at"]
    assert names["steps"].schema.names == [
        "card",
        "amount",
        "shop",
        "paid_at",
        "classifier",
        "match_number",
        "so_far",
        "all",
        "matched_at",
    ]
    assert names["alerts"].schema.names == ["card", "pattern", "total", "matched_at"]
    names["bank"].plan().check_kernels()


def the_functions_are_what_the_page_says(names: dict[str, Any]) -> None:
    assert names["tags"].schema.names == ["order_id", "tag"]
    assert names["cents"].schema.names == ["order_id", "cents"]
    assert names["exploded"].schema.names == ["order_id", "customer", "amount", "n", "tag"]
    for name in ("tags", "cents", "exploded"):
        names["shop"].write(name, names[name])
    names["shop"].plan().check_kernels()


def the_processors_are_what_the_page_says(names: dict[str, Any]) -> None:
    assert [name for name in ("reminders", "fast", "unpaid") if names[name].key != ("cart",)] == []
    assert names["noon"].year == 2026


def the_searches_are_what_the_page_says(names: dict[str, Any]) -> None:
    assert names["alerts"].schema.names[-4:] == ["subscription", "query", "reader", "score"]
    assert names["digests"].schema.names[-1] == "matches"
    assert [row["title"] for row in names["found"]] == ["Storm at sea"]
    names["press"].plan().check_kernels()


def the_gateways_are_what_the_page_says(names: dict[str, Any]) -> None:
    assert (names["door"].kind, names["door"].topics) == ("http", ("orders", "pushes"))
    assert [
        (each.name, each.policy.name, each.policy.rows) for each in names["shop"].gateways.values()
    ] == [("http.8766", "buffer", 50_000)]
    names["shop"].plan().check_kernels()


def the_alerts_are_what_the_page_says(names: dict[str, Any]) -> None:
    alert, slump = names["shop"].alerts.values()
    assert (slump.name, slump.by) == ("slump", ("region",))
    assert (alert.name, alert.topic, alert.every_us, len(alert.to)) == (
        "spike",
        "alert.spike",
        300_000_000,
        2,
    )
    names["shop"].plan().check_kernels()


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "concepts/joins.md": the_joins_are_what_the_page_says,
    "concepts/windows.md": the_windows_are_what_the_page_says,
    "how-to/test.md": a_pipeline_is_tested_as_the_page_says,
    "concepts/change-capture.md": the_captures_are_what_the_page_says,
    "edges/sinks.md": the_sinks_are_what_the_page_says,
    "concepts/event-sourcing.md": events_are_what_the_page_says,
    "concepts/patterns.md": the_patterns_are_what_the_page_says,
    "concepts/search.md": the_searches_are_what_the_page_says,
    "how-to/functions.md": the_functions_are_what_the_page_says,
    "concepts/processors.md": the_processors_are_what_the_page_says,
    "edges/gateways.md": the_gateways_are_what_the_page_says,
    "edges/alerts.md": the_alerts_are_what_the_page_says,
}


def test_pages_that_are_looked_at_are_there() -> None:
    assert set(CHECKS) <= set(pages())


def test_every_page_with_snippets_is_run_somewhere() -> None:
    elsewhere = [*pages(spark=True), *pages(spark=True, server=KAFKA), *pages(server=POSTGRES)]
    with_snippets = [
        path.relative_to(DOCS).as_posix()
        for path in sorted(DOCS.rglob("*.md"))
        if snippets(path.read_text())
    ]
    assert sorted([*pages(), *elsewhere, NEEDS_A_CLUSTER]) == with_snippets


def test_commands_for_a_cluster_have_options_that_there_are() -> None:
    lines = [
        line.removeprefix("$ ").split()
        for each in snippets((DOCS / NEEDS_A_CLUSTER).read_text())
        for line in each.text.splitlines()
    ]
    ours = [words[1:] for words in lines if words[0] == "headrace"]
    assert [words[0] for words in ours] == ["demo", "run", "status", "top"]
    for command, *words in ours:
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
        assert [word for word in words if word.startswith("--") and word not in shown] == []


def test_no_command_is_shown_that_is_not_run() -> None:
    fences = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    shown = [
        (path.name, language, text)
        for path in DOCS.rglob("*.md")
        for language, text in fences.findall(path.read_text())
    ]
    assert len(shown) > 100
    not_run = [each for each in shown if each[1] not in {"bash", "console", "python"}]
    assert [
        each
        for each in not_run
        if each[1] in {"sh", "shell", "zsh"}
        or re.search(r"^\s*(\$|headrace|curl|python|pip) ", each[2], re.MULTILINE)
    ] == []


@pytest.mark.parametrize("name", pages())
def test_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_page(name, tmp_path, monkeypatch)
    if name in CHECKS:
        CHECKS[name](names)
