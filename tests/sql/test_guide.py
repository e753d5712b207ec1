"""The guide's page about SQL: its pipeline has the plan of a Python twin, and every example of its
reference compiles over the topics of that pipeline.
"""

import re
from pathlib import Path

import headrace as hr
from headrace.pipeline.loader import load_pipeline
from headrace.testing.pipelines import PipelineTest

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "sql.md").read_text()
BLOCKS = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = dict(re.findall(r'^```sql title="([\w.]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))


def python_twin() -> hr.Pipeline:
    shop = hr.Pipeline("shop")
    orders = shop.topic(
        "orders",
        schema=(
            "order_id BIGINT, customer_id BIGINT, region STRING, amount DOUBLE, placed_at TIMESTAMP"
        ),
        key="order_id",
        event_time=hr.EventTime("placed_at", delay="10 seconds"),
        retention="30 days",
    )
    customers = shop.table(
        "customers", schema="customer_id BIGINT, name STRING, tier STRING", key="customer_id"
    )
    revenue = orders.group_by("region").aggregate(orders=hr.agg.count(), total=hr.agg.sum("amount"))
    shop.view("revenue", revenue)
    hourly = (
        orders.window(hr.tumbling("1 hour"), late=hr.late.correct("1 day"), emit="changes")
        .group_by("region")
        .aggregate(total=hr.agg.sum("amount"))
    )
    shop.view("hourly", hourly)
    named = orders.join(customers, on="customer_id", how="left").where("amount > 100")
    shop.write("large_orders", named.select("order_id", "amount", "name"))
    shop.alert("much", hourly.where("total > 1000"), every="5 minutes")
    return shop


def test_the_pipeline_of_the_guide_has_the_plan_of_its_python_twin(tmp_path: Path) -> None:
    (tmp_path / "shop.sql").write_text(FILES["shop.sql"])
    shop = load_pipeline(tmp_path / "shop.sql")
    assert str(shop.plan()) == str(python_twin().plan())
    assert shop.plan() == python_twin().plan()
    with PipelineTest(shop, tmp_path / "test") as test:
        shop.captures["insert.orders"].run(log=test.log.address, until_caught_up=True)
        test.settle()
        assert test.view("revenue") == [{"region": "north", "orders": 2, "total": 270.0}]


def test_every_example_of_the_reference_compiles(tmp_path: Path) -> None:
    (tmp_path / "shop.sql").write_text(FILES["shop.sql"])
    shop = load_pipeline(tmp_path / "shop.sql")
    assert len(BLOCKS) >= 6
    for block in BLOCKS:
        shop.sql(block)
    assert {"shopdb", "files", "api"} <= shop.captures.keys()


def test_the_example_in_sql_keeps_its_views(tmp_path: Path) -> None:
    sensors = load_pipeline(Path(__file__).parents[2] / "examples" / "20_sql.sql", "sensors")
    with PipelineTest(sensors, tmp_path) as test:
        for topic in ("sensors", "readings"):
            sensors.captures[f"insert.{topic}"].run(log=test.log.address, until_caught_up=True)
            test.settle()
        assert sorted(
            (row["room"], row["sensors"], row["celsius"]) for row in test.view("rooms")
        ) == [
            ("attic", 2, 28.0),
            ("cellar", 1, 13.0),
        ]
        assert sorted((row["sensor"], row["highest"]) for row in test.view("minutes")) == [
            ("a", 13.0),
            ("b", 24.0),
            ("c", 32.0),
        ]
        (warm,) = test.log.read("too_warm").to_pylist()
        assert (warm["sensor"], warm["room"]) == ("c", "attic")
