"""How a topic's columns change: what is refused, and what the history remembers."""

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.errors import BadSchema, IncompatibleChange, UnknownColumn
from headrace.types.schema import parse_schema, to_ddl
from headrace.types.schema_history import (
    MAX_CHANGES,
    NO_HISTORY,
    ColumnChange,
    SchemaHistory,
    differences,
    evolve,
)

TOPIC = "id INT NOT NULL, name STRING COMMENT 'whole', fax STRING, price DECIMAL(5,2)"


def change(
    ddl: str, history: SchemaHistory = NO_HISTORY, key: tuple[str, ...] = (), **what: Any
) -> tuple[str, SchemaHistory]:
    schema, history = evolve(
        parse_schema(ddl), history, ColumnChange.of(**what), key=key, where="The topic 't'"
    )
    return to_ddl(schema), history


def test_columns_are_added_at_the_end() -> None:
    ddl, history = change("a BIGINT NOT NULL", add="b STRING COMMENT 'new', c ARRAY<INT>")
    assert ddl == "a BIGINT NOT NULL, b STRING COMMENT 'new', c ARRAY<INT>"
    assert history == SchemaHistory(added=("b", "c"))


@pytest.mark.parametrize("ddl", ["a STRING", "A STRING", "b STRING, a BIGINT"])
def test_a_column_cannot_be_added_twice(ddl: str) -> None:
    with pytest.raises(IncompatibleChange, match="already"):
        change("a BIGINT", add=ddl)


def test_a_column_that_old_rows_cannot_have_is_refused() -> None:
    with pytest.raises(IncompatibleChange, match="'b' is NOT NULL"):
        change("a BIGINT", add="b STRING NOT NULL")


def test_one_change_names_columns_as_they_are_before_it() -> None:
    ddl, history = change(
        TOPIC, alter="id BIGINT, name STRING", drop="fax", rename={"id": "number"}, add="at DATE"
    )
    assert ddl == "number BIGINT, name STRING COMMENT 'whole', price DECIMAL(5,2), at DATE"
    assert history == SchemaHistory(
        added=("at",),
        renamed=(("id", "number"),),
        widened=(("number", "INT NOT NULL"),),
        dropped=(("fax", "STRING"),),
    )
    assert SchemaHistory.load(history.dump()) == history


WIDER = {
    "TINYINT": ["SMALLINT", "INT", "BIGINT", "DOUBLE", "DECIMAL(3,0)"],
    "INT": ["BIGINT", "DOUBLE", "DECIMAL(12,2)"],
    "BIGINT": ["DECIMAL(19,0)", "DECIMAL(38,4)"],
    "FLOAT": ["DOUBLE"],
    "DECIMAL(5,2)": ["DECIMAL(6,2)", "DECIMAL(6,3)", "DECIMAL(38,10)"],
    "VARCHAR(5)": ["VARCHAR(6)", "STRING"],
    "STRING NOT NULL": ["STRING"],
    "ARRAY<INT>": ["ARRAY<BIGINT>"],
    "MAP<STRING, FLOAT>": ["MAP<STRING, DOUBLE>"],
    "STRUCT<a: INT NOT NULL, b: STRING>": ["STRUCT<a: BIGINT, b: STRING>"],
}
NARROWER = {
    "BIGINT": ["INT", "DOUBLE", "DECIMAL(18,0)", "STRING", "BIGINT NOT NULL"],
    "INT": ["FLOAT", "DECIMAL(10,2)", "STRING", "BOOLEAN"],
    "DOUBLE": ["FLOAT", "DECIMAL(38,10)"],
    "DECIMAL(5,2)": ["DECIMAL(5,3)", "DECIMAL(4,2)", "DECIMAL(5,1)", "DOUBLE"],
    "STRING": ["VARCHAR(100)", "BINARY", "STRING NOT NULL"],
    "VARCHAR(5)": ["VARCHAR(4)"],
    "DATE": ["TIMESTAMP"],
    "TIMESTAMP": ["TIMESTAMP_NTZ", "DATE"],
    "ARRAY<BIGINT>": ["ARRAY<INT>", "BIGINT"],
    "MAP<INT, STRING>": ["MAP<BIGINT, STRING>"],
    "STRUCT<a: INT>": ["STRUCT<b: INT>", "STRUCT<a: INT, b: INT>", "STRUCT<a: INT NOT NULL>"],
}


def _cases(types: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    return [(before, after) for before, others in types.items() for after in others]


@pytest.mark.parametrize(("before", "after"), _cases(WIDER))
def test_types_widen(before: str, after: str) -> None:
    ddl, history = change(f"id INT, x {before}", alter=f"x {after}")
    assert ddl == f"id INT, x {after}"
    assert history.widened == (("x", before),)


@pytest.mark.parametrize(("before", "after"), _cases(NARROWER))
def test_types_that_would_lose_values_are_refused(before: str, after: str) -> None:
    with pytest.raises(IncompatibleChange, match="'x'"):
        change(f"id INT, x {before}", alter=f"x {after}")


@pytest.mark.parametrize(
    "what",
    [
        {"alter": "id BIGINT"},
        {"alter": "id INT"},
        {"drop": "id"},
        {"rename": {"id": "number"}},
    ],
)
def test_a_key_does_not_change(what: dict[str, Any]) -> None:
    with pytest.raises(IncompatibleChange, match="'id' decides in which partition"):
        change(TOPIC, key=("id",), **what)


def test_what_is_not_there_cannot_change() -> None:
    for what in ({"drop": ["nam"]}, {"rename": {"nam": "x"}}, {"alter": "nam STRING"}):
        with pytest.raises(UnknownColumn, match="did you mean 'name'"):
            change(TOPIC, **what)
    with pytest.raises(IncompatibleChange, match="no column left"):
        change("a INT, b INT", drop=["a", "b"])
    with pytest.raises(BadSchema, match="reserved"):
        change(TOPIC, rename={"name": "_offset"})
    with pytest.raises(IncompatibleChange, match="already"):
        change(TOPIC, rename={"name": "FAX"})


def test_a_name_belongs_to_one_column_for_ever() -> None:
    ddl, history = change(TOPIC, drop="fax", rename={"name": "title"})
    for what in (
        {"add": "fax STRING"},
        {"add": "Fax INT"},
        {"add": "name STRING"},
        {"rename": {"price": "fax"}},
        {"rename": {"price": "name"}},
    ):
        with pytest.raises(IncompatibleChange, match="had another column"):
            change(ddl, history, **what)
    ddl, history = change(ddl, history, rename={"title": "name"})
    assert (history.renamed, history.former_names("name")) == ((("title", "name"),), ["title"])
    ddl, history = change(ddl, history, drop="name")
    assert history.renamed == ()
    assert {name for name, _ in history.dropped} == {"fax", "name", "title"}


def test_a_renamed_column_is_found_by_all_its_names() -> None:
    ddl, history = change("a INT, x INT", add="n INT")
    for old, new in (("n", "m"), ("m", "o")):
        ddl, history = change(ddl, history, rename={old: new})
    assert (history.present_name("n"), history.present_name("m")) == ("o", "o")
    assert (history.former_names("o"), history.added) == (["n", "m"], ("o",))


def test_a_history_is_bounded() -> None:
    names = ", ".join(f"c{number} INT" for number in range(MAX_CHANGES + 1))
    with pytest.raises(IncompatibleChange, match="more than 1000"):
        change("a INT", add=names)


def test_a_declaration_may_be_that_of_an_earlier_time() -> None:
    ddl, history = change(
        TOPIC, alter="id BIGINT", drop="fax", rename={"name": "title"}, add="at DATE"
    )
    present = parse_schema(ddl)

    def kinds(declared: str) -> list[str]:
        return [kind for kind, _ in differences(parse_schema(declared), present, history)]

    assert kinds(ddl) == []
    assert kinds("id BIGINT, title STRING COMMENT 'whole', price DECIMAL(5,2)") == []
    assert kinds("id INT NOT NULL, name STRING COMMENT 'whole', price DECIMAL(5,2)") == []
    assert kinds(TOPIC) == ["unknown"]
    assert kinds("id BIGINT") == ["more", "more"]
    assert kinds("id SMALLINT, title STRING COMMENT 'whole', price DECIMAL(5,2)") == ["type"]
