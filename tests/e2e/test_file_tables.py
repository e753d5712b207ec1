"""Streams that look up tables in files: formats and types, against DuckDB; and what an edited file
means.
"""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import headrace as hr
from headrace.errors import HeadraceError, PlanError, StreamOnly, UnknownColumn
from headrace.pipeline import file_table as module
from headrace.testing.pipelines import PipelineTest

pytestmark = pytest.mark.usefixtures("no_syncs")
SCHEMA = "code STRING, n INT, name STRING, rate DECIMAL(6, 2), since DATE, at TIMESTAMP, ok BOOLEAN"
ROWS: list[dict[str, Any]] = [
    {
        "code": "AT",
        "n": 1,
        "name": "Österreich, gut",
        "rate": Decimal("20.50"),
        "since": date(1995, 1, 1),
        "at": datetime(2026, 1, 1, 12, tzinfo=UTC),
        "ok": True,
    },
    {"code": "AT", "n": 2, "name": "", "rate": None, "since": None, "at": None, "ok": None},
    {"code": "DE", "n": 1, "name": None, "rate": Decimal("-0.01"), "since": None, "at": None},
    {"code": "NA", "n": -5, "name": 'say "NA"', "rate": None, "since": None, "at": None},
]


def written(root: Path, kind: str) -> Path:
    path = root / f"countries.{kind}"
    if kind == "csv":
        lines = [
            "more,code,n,name,rate,since,at,ok",
            'x,AT,1,"Österreich, gut",20.50,1995-01-01,2026-01-01T12:00:00Z,true',
            'x,AT,2,"",,,,',
            "x,DE,1,,-0.01,,,",
            'x,NA,-5,"say ""NA""",,,,',
        ]
        path.write_text("\n".join(lines) + "\n")
    elif kind == "json":
        lines = [json.dumps({"more": [1], **row}, default=text) for row in ROWS]
        path.write_text("\n".join(lines) + "\n")
    else:
        kinds = {"rate": pa.decimal128(6, 2), "n": pa.int32(), "at": pa.timestamp("ms", "UTC")}
        table = pa.Table.from_pylist([{"ok": None, **row} for row in ROWS])
        for name, kind_of_column in kinds.items():
            index = table.schema.get_field_index(name)
            table = table.set_column(index, name, table[name].cast(kind_of_column))
        parquet.write_table(table, path)
    return path


def text(value: Any) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def shop(file: Path, how: str = "left") -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="id BIGINT, code STRING, n INT", key="id")
    countries = hr.file_table(file, schema=SCHEMA, key=["n", "code"])
    known = orders.join(
        countries, left_on=["upper(code)", "n"], right_on=["code", "n"], how=how, suffix="_known"
    )
    pipeline.write("known", known)
    pipeline.view("names", known.group_by("name").aggregate(n=hr.agg.count()))
    return pipeline


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
@pytest.mark.parametrize("how", ["left", "inner"])
def test_each_row_has_the_columns_of_its_key(tmp_path: Path, kind: str, how: str) -> None:
    orders: list[dict[str, Any]] = [
        {"id": number, "code": code, "n": n}
        for number, (code, n) in enumerate(
            [("at", 1), ("AT", 2), ("de", 1), ("na", -5), ("xx", 1), (None, 1), ("AT", None)]
        )
    ]
    by_key = {(row["code"], row["n"]): row for row in ROWS}
    with PipelineTest(shop(written(tmp_path, kind), how), tmp_path / "test") as test:
        for part in (orders[:3], orders[3:]):
            test.feed("orders", part)
            test.settle()
            test.restart(shards=3)
        found = {row["id"]: row for row in test.log.read("known").to_pylist()}
    for order in orders:
        match = by_key.get((str(order["code"] or "?").upper(), order["n"]))
        if match is None and how == "inner":
            assert order["id"] not in found
            continue
        row = found.pop(order["id"])
        assert (row["code"], row["n"]) == (order["code"], order["n"])
        for name in ("name", "rate", "since", "at", "ok"):
            assert row[name] == (match or {}).get(name), (name, order)
    assert not found


def test_an_edited_file_is_an_edited_pipeline(tmp_path: Path) -> None:
    file = written(tmp_path, "csv")
    with PipelineTest(shop(file), tmp_path / "test") as test:
        test.feed("orders", [{"id": 1, "code": "AT", "n": 1}])
        test.settle()
        assert [row["name"] for row in test.view("names")] == ["Österreich, gut"]
        moved = file.rename(tmp_path / "moved.csv")
        test.pipeline = shop(moved)
        test.restart()  # the same content, elsewhere
        moved.write_text(moved.read_text().replace("gut", "schön"))
        test.pipeline = shop(moved)
        with pytest.raises(HeadraceError, match="known"):
            test.restart()
        with test.replay("v2", pipeline=shop(moved)) as version:
            version.settle()
            assert [row["name"] for row in version.view("names.v2")] == ["Österreich, schön"]


def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declared(text: str, name: str = "t.csv", schema: str = "k INT, v STRING") -> Any:
        path = tmp_path / name
        path.write_text(text)
        return hr.file_table(path, schema=schema, key="k")

    assert declared("k,v\n").rows.num_rows == 0
    with pytest.raises(PlanError, match=r"has the key \{'k': 1\} more than once"):
        declared("k,v\n1,a\n2,b\n1,c\n")
    with pytest.raises(PlanError, match="whose key 'k' is null"):
        declared("k,v\n,a\n")
    with pytest.raises(PlanError, match="does not fit the columns"):
        declared("k,v\nx,a\n")
    with pytest.raises(PlanError, match="does not fit the columns"):
        declared("k\n1\n")
    with pytest.raises(PlanError, match="does not fit the columns.*null"):
        declared("k,v\n1,\n", schema="k INT, v STRING NOT NULL")
    with pytest.raises(PlanError, match="has the format None"):
        declared("k,v\n", "t.txt")
    with pytest.raises(PlanError, match="cannot be read"):
        hr.file_table(tmp_path / "absent.csv", schema="k INT", key="k")
    with pytest.raises(UnknownColumn, match="'w'"):
        hr.file_table(tmp_path / "t.csv", schema="k INT", key="w")
    rows = hr.Pipeline("p").topic("t", schema="k INT, v STRING", event_time=None)
    file = declared("k,v\n1,a\n")
    with pytest.raises(PlanError, match="its key is k"):
        rows.join(file, left_on="v", right_on="v", suffix="_file")
    with pytest.raises(PlanError, match="how='full'"):
        rows.join(file, on="k", how="full", suffix="_file")
    with pytest.raises(StreamOnly, match="with a file"):
        table: Any = rows.to_table("k")
        table.join(file, on="k", suffix="_file")
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 5)
    with pytest.raises(PlanError, match="at most 5"):
        declared("k,v\n1,a\n")
