"""Statements declare what Python declares: topics, tables, views, sources, sinks, alerts."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import BadPipelineFile, BadSql, HeadraceError, PlanError
from headrace.pipeline.loader import load_pipeline, load_sql
from headrace.testing.pipelines import PipelineTest

ORDERS = """
CREATE TOPIC orders (
    order_id BIGINT, region STRING NOT NULL, amount DECIMAL(10, 2), placed_at TIMESTAMP,
    number BIGINT METADATA FROM '_offset'
) WITH (
    key = 'order_id', partitions = 2, event_time = 'placed_at', delay = '10 seconds',
    producer = 'region', idle = INTERVAL 5 MINUTES, retention = '30 days'
)
"""


def test_topics_and_tables_are_those_of_python() -> None:
    spelled, python = hr.Pipeline("shop"), hr.Pipeline("shop")
    spelled.sql(
        ORDERS
        + """;
        CREATE TOPIC payments (
            id BIGINT, paid_at TIMESTAMP, WATERMARK FOR paid_at AS paid_at - INTERVAL '4' SECOND);
        CREATE TOPIC clicks (user STRING) WITH (processing_time = 'seen', shed_behind = 1000);
        CREATE TABLE prices (item STRING, shop INT, price DOUBLE, since TIMESTAMP,
            PRIMARY KEY (item, shop)) WITH (event_time = since, history = '30 days');
        CREATE TOPIC IF NOT EXISTS clicks (user STRING)
        """
    )
    python.topic(
        "orders",
        schema=(
            "order_id BIGINT, region STRING NOT NULL, amount DECIMAL(10, 2), placed_at TIMESTAMP"
        ),
        key="order_id",
        partitions=2,
        event_time=hr.EventTime(
            "placed_at", delay="10 seconds", producer="region", idle="5 minutes"
        ),
        retention="30 days",
        metadata={"number": "_offset"},
    )
    python.topic(
        "payments",
        schema="id BIGINT, paid_at TIMESTAMP",
        event_time=hr.EventTime("paid_at", delay="4 seconds"),
    )
    python.topic(
        "clicks",
        schema="user STRING",
        event_time=hr.processing_time("seen"),
        shed=hr.shed(behind=1000),
    )
    python.table(
        "prices",
        schema="item STRING, shop INT, price DOUBLE, since TIMESTAMP",
        key=["item", "shop"],
        event_time="since",
        history="30 days",
    )
    for pipeline in (spelled, python):
        pipeline.write("copy", pipeline.input("orders"))
    assert spelled.plan() == python.plan()
    assert str(spelled.plan()) == str(python.plan())


def test_outputs_are_those_of_python() -> None:
    spelled, python = hr.Pipeline("shop"), hr.Pipeline("shop")
    schema = "order_id BIGINT, region STRING, amount DOUBLE"
    spelled.sql(f"""
        CREATE TOPIC orders ({schema});
        CREATE TEMPORARY VIEW large AS SELECT * FROM orders WHERE amount > 100;
        CREATE MATERIALIZED VIEW revenue WITH (keep = '7 days', keep_changes = 10) AS
            SELECT region, sum(amount) AS total FROM large GROUP BY region;
        CREATE STREAM large_orders WITH (retention = '7 days', partitions = 3) AS TABLE large;
        CREATE TABLE latest AS SELECT * FROM Revenue WHERE total > 1;
        CREATE SINK copy INTO 'sqlite:shop.db' WITH (table = 'revenue', partitions = 2)
            AS SELECT * FROM revenue;
        CREATE ALERT rich TO 'https://example.com/hook' WITH (every = '5 minutes', by = region,
            for = '1 minute') AS SELECT * FROM revenue WHERE total > 1000
    """)
    orders = python.topic("orders", schema=schema)
    large = orders.where("amount > 100")
    revenue = large.group_by("region").aggregate(total=hr.agg.sum("amount"))
    python.view("revenue", revenue, keep="7 days", keep_changes=10)
    python.write("large_orders", large, retention="7 days", partitions=3)
    python.write("latest", revenue.where("total > 1"))
    python.sink(hr.sinks.sqlite("shop.db", table="revenue", name="copy"), revenue, partitions=2)
    python.alert(
        "rich",
        revenue.where("total > 1000"),
        to=hr.sinks.webhook("https://example.com/hook"),
        every="5 minutes",
        by="region",
        for_="1 minute",
    )
    assert str(spelled.plan()) == str(python.plan())
    assert spelled.plan() == python.plan()
    assert spelled.sinks == python.sinks
    assert spelled.alerts == python.alerts


def test_sources_and_gateways_are_those_of_python(tmp_path: Path) -> None:
    spelled, python = hr.Pipeline("shop"), hr.Pipeline("shop")
    spelled.directory = tmp_path
    spelled.sql("""
        CREATE TOPIC orders (order_id BIGINT);
        CREATE SOURCE shopdb FROM SQLITE 'shop.db' (
            TABLE people (id BIGINT PRIMARY KEY, name STRING)) WITH (prefix = 'db_');
        CREATE SOURCE files FROM DIRECTORY 'incoming' INTO orders WITH (pattern = '*.csv');
        CREATE SOURCE api FROM HTTP 'https://example.com/orders' INTO orders
            WITH (every = '1 minute');
        CREATE SOURCE door FROM HTTP INTO orders WITH (port = 8080);
        CREATE VIEW people AS SELECT * FROM db_people
    """)
    capture = hr.cdc.sqlite("shop.db", tables=["people"], name="shopdb", prefix="db_")
    python.topic("orders", schema="order_id BIGINT")
    people = python.capture(capture, "people", schema="id BIGINT, name STRING", key="id")
    directory = tmp_path / "incoming"
    python.source(hr.sources.directory(directory, topic="orders", pattern="*.csv", name="files"))
    python.source(
        hr.sources.poll("https://example.com/orders", topic="orders", every="1 minute", name="api")
    )
    python.gateway(hr.gateways.http("orders", port=8080, name="door"))
    python.view("people", people)
    assert spelled.plan() == python.plan()
    assert spelled.captures == python.captures
    assert spelled.gateways == python.gateways


def test_a_function_of_a_module_next_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "code_of_the_sql_test.py").write_text(
        "def doubled(x):\n    return None if x is None else 2 * x\n"
    )
    (tmp_path / "shop.sql").write_text(
        "CREATE TOPIC orders (amount DOUBLE);"
        "CREATE FUNCTION sql_doubled AS 'code_of_the_sql_test:doubled' RETURNS DOUBLE WITH"
        " (each_row = TRUE);"
        "CREATE STREAM doubled AS SELECT sql_doubled(amount) + 1 AS x FROM orders"
    )
    plan = load_pipeline(tmp_path / "shop.sql").plan()
    sys.modules.pop("code_of_the_sql_test")
    assert "sql_doubled" in str(plan)


def test_rows_of_insert_are_stored_once(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("shop")
    text = """
        CREATE TOPIC orders (id BIGINT, at TIMESTAMP, price DECIMAL(10, 2), share DOUBLE,
            ok BOOLEAN, tags ARRAY<STRING>, name STRING);
        INSERT INTO orders VALUES
            (1, TIMESTAMP '2026-01-31 12:00:00', 9.95, 0.5, TRUE, ARRAY('a', 'b'), 'it\\'s'),
            (2, NULL, -1, 1e3, FALSE, ARRAY(), NULL);
        INSERT INTO orders (name, id) VALUES ('last', 3)
    """
    pipeline.sql(text)
    with hr.open_log(f"file:{tmp_path}") as log:
        schema = "id BIGINT, at TIMESTAMP, price DECIMAL(10, 2), share DOUBLE, ok BOOLEAN"
        log.create_topic("orders", schema=f"{schema}, tags ARRAY<STRING>, name STRING")
    source = pipeline.captures["insert.orders"]
    for _ in range(2):
        source.run(log=f"file:{tmp_path}", until_caught_up=True)
    pipeline.sql("INSERT INTO orders (id) VALUES (4)")
    pipeline.captures["insert.orders"].run(log=f"file:{tmp_path}", until_caught_up=True)
    with hr.open_log(f"file:{tmp_path}") as log:
        rows = log.read("orders").to_pylist()
    assert [row["id"] for row in rows] == [1, 2, 3, 4]
    first = rows[0]
    assert first["at"] == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert str(first["price"]) == "9.95"
    assert (first["share"], first["ok"], first["tags"], first["name"]) == (
        0.5,
        True,
        ["a", "b"],
        "it's",
    )
    assert rows[2]["name"] == "last"


def test_drop_takes_what_nothing_reads() -> None:
    pipeline = hr.Pipeline("shop")
    pipeline.sql("""
        CREATE TOPIC orders (id BIGINT, region STRING);
        CREATE VIEW counts AS SELECT region, count(*) AS n FROM orders GROUP BY region;
        CREATE VIEW many AS SELECT * FROM counts WHERE n > 3;
        CREATE SINK copy FROM counts INTO 'sqlite:x.db';
        CREATE ALERT busy AS SELECT * FROM many
    """)
    with pytest.raises(PlanError, match="reads the view 'counts'"):
        pipeline.sql("DROP VIEW counts")
    with pytest.raises(PlanError, match="It is a view"):
        pipeline.sql("DROP TOPIC many")
    pipeline.sql("DROP ALERT busy; DROP SINK copy; DROP VIEW many; DROP VIEW IF EXISTS nothing")
    assert [output.name for output in pipeline.plan().outputs] == ["counts"]
    pipeline.sql(
        "CREATE OR REPLACE VIEW counts AS SELECT region, count(*) AS m FROM orders GROUP BY 1"
    )
    assert pipeline.declared_rows()["counts"].schema.names == ["region", "m"]
    assert pipeline.alerts == {}
    assert pipeline.sinks == {}


def test_names_are_shared_with_python() -> None:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="id BIGINT, region STRING, amount DOUBLE")
    large = orders.where("amount > 10")
    found = pipeline.sql("SELECT region, count(*) AS n FROM large GROUP BY region", large=large)
    assert found.step == large.group_by("region").aggregate(n=hr.agg.count()).step
    with pytest.raises(HeadraceError, match="no topic, table or view 'large'"):
        pipeline.sql("SELECT * FROM large")
    pipeline.view("counts", found)
    assert pipeline.sql("SELECT * FROM COUNTS").step == found.step
    assert pipeline.sql("SELECT id FROM orders", name="ids").step.name == "ids"


def test_show_describe_and_explain_answer_with_rows() -> None:
    pipeline = hr.Pipeline("shop")
    pipeline.sql(ORDERS)
    pipeline.sql("CREATE VIEW n AS SELECT region, count(*) AS n FROM orders GROUP BY region")
    shown: pa.Table = pipeline.sql("SHOW ALL")
    assert [(row["name"], row["kind"]) for row in shown.to_pylist()] == [
        ("n", "view"),
        ("orders", "topic"),
    ]
    described = pipeline.sql("DESCRIBE orders").to_pylist()
    assert described[0] == {
        "column": "order_id",
        "type": "BIGINT",
        "nullable": "yes",
        "role": "key",
    }
    assert [row["role"] for row in described if row["column"] == "placed_at"] == ["event time"]
    assert pipeline.sql("DESCRIBE SELECT amount * 2 AS x FROM orders")["column"].to_pylist() == [
        "x"
    ]
    explained = pipeline.sql(
        "EXPLAIN SELECT region, window_start, window_end, count(*) AS n FROM"
        " TUMBLE(orders, placed_at, INTERVAL 1 HOUR) GROUP BY ALL"
    ).to_pylist()
    assert explained[-1]["step"] == "query.window"
    assert explained[-1]["keeps"] == "state per region"
    assert explained[-1]["waits_for"] == "orders.placed_at"
    assert pipeline.sql("EXPLAIN")["step"].to_pylist() == ["orders", "n.aggregate"]
    assert "SELECT region" in pipeline.sql("SHOW CREATE VIEW n")["statement"].to_pylist()[0]


def test_statements_of_a_session_without_trust_name_no_code() -> None:
    from headrace.sql.session import SqlSession

    session = SqlSession(hr.Pipeline("shop"), trusted=False)
    with pytest.raises(HeadraceError, match="only the pipeline's author may"):
        session.run("CREATE FUNCTION f AS 'os:system' RETURNS INT")


# Files


def test_a_file_is_a_pipeline_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "shop.sql"
    path.write_text(
        "CREATE TOPIC o (id BIGINT, n INT);\n"
        "CREATE VIEW v AS SELECT n, count(*) AS c FROM o GROUP BY n"
    )
    pipeline = load_pipeline(path)
    assert (pipeline.name, pipeline.directory) == ("shop", tmp_path)
    assert [step.name for step in pipeline.plan().steps()] == ["o", "v.aggregate"]
    assert len(load_sql(path, "other")[1]) == 2
    with PipelineTest(pipeline, tmp_path / "test") as test:
        test.feed("o", [{"id": 1, "n": 2}, {"id": 2, "n": 2}])
        test.settle()
        assert test.view("v") == [{"n": 2, "c": 2}]


def test_a_file_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    path = tmp_path / "shop.sql"
    path.write_text("CREATE TOPIC o (id BIGNT);\nSELECT x FROM y")
    with pytest.raises(BadSql, match=r"shop.sql, line 2, position 15: There is no topic"):
        load_pipeline(path)
    path.write_bytes(b"SELECT '\xff'")
    with pytest.raises(BadPipelineFile, match="byte 8 is not UTF-8"):
        load_pipeline(path)
    with pytest.raises(BadPipelineFile, match="There is no file"):
        load_pipeline(tmp_path / "none.sql")


def run_cli(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_headrace_plan_takes_a_file_of_sql(tmp_path: Path) -> None:
    path = tmp_path / "shop.sql"
    path.write_text(
        "CREATE TOPIC o (id BIGINT, n INT);\n"
        "CREATE VIEW v AS SELECT n, count(*) AS c FROM o GROUP BY n;\nSHOW VIEWS"
    )
    done = run_cli("plan", path)
    assert done.returncode == 0, done.stderr
    assert "aggregate by n: c = count()" in done.stdout
    assert "KIND" in done.stdout
    path.write_text("CREATE TOPIC o (id BIGNT)")
    failed = run_cli("plan", path)
    assert failed.returncode != 0
    assert "shop.sql, line 1, position 17" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_table_in_a_file_is_joined_by_streams(tmp_path: Path) -> None:
    (tmp_path / "names.csv").write_text("region,name\nn,North\ns,South\n")
    path = tmp_path / "shop.sql"
    path.write_text("""
        CREATE TOPIC orders (id BIGINT, region STRING);
        CREATE TABLE names (region STRING PRIMARY KEY, name STRING) WITH (file = 'names.csv');
        CREATE STREAM named AS SELECT id, name FROM orders LEFT JOIN names USING (region)
    """)
    pipeline = load_pipeline(path)
    with PipelineTest(pipeline, tmp_path / "test") as test:
        test.feed("orders", [{"id": 1, "region": "n"}, {"id": 2, "region": "x"}])
        test.settle()
        rows = test.log.read("named").to_pylist()
    assert [(row["id"], row["name"]) for row in rows] == [(1, "North"), (2, None)]
    assert pipeline.sql("DESCRIBE names")["column"].to_pylist() == ["region", "name"]
    with pytest.raises(PlanError, match="begin with the stream"):
        pipeline.sql("SELECT * FROM names")
    with pytest.raises(HeadraceError, match="Line 1"):
        pipeline.sql("SELECT * FROM CHANGES OF names")
