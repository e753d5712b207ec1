"""The snippets of the page about joins are one pipeline that can be declared, with the rows that the page says."""

from pathlib import Path
from typing import Any

from tests.test_readme import sections

PAGE = Path(__file__).parents[1] / "docs" / "joins.md"


def declared() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for section in sections(PAGE.read_text()):
        for _, line, text in section.blocks:
            exec(compile("\n" * line + text, str(PAGE), "exec"), names)
    return names


def test_the_joins_are_what_the_page_says() -> None:
    names = declared()
    kinds = {name: type(names[name]).__name__ for name in ("paid", "enriched", "taxed", "corrected", "placed", "timeline", "mutual", "versions")}
    assert kinds == {
        "paid": "Stream", "enriched": "Stream", "taxed": "Stream", "corrected": "Table", "placed": "Table", "timeline": "Table", "mutual": "Table",
        "versions": "Table",
    }  # fmt: skip
    assert names["corrected"].key == ("order_id",)
    assert names["placed"].key == ("order_id",)
    assert set(names["timeline"].key) == {"post", "follower", "author"}
    assert [output.name for output in names["shop"].plan().outputs] == ["best", "taxed"]
