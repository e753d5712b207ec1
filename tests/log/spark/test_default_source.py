"""`format("headrace")` in a Spark session that knows nothing of Headrace: Spark finds the source by
itself, and registering it as well is no error.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr
from tests.java import require_java
from tests.log.spark.conftest import ORDERS, orders

SCRIPT = """
import sys
from pyspark.sql import SparkSession

session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
topic = {"log": "file:log", "topic": "orders"}
assert session.read.format("headrace").options(**topic).load().count() == 5
assert "headrace" not in sys.modules
from headrace.log.spark import register

register(session)
rows = session.read.format("headrace").options(**topic).load()
rows.select("order_id", "customer_id", "note").write.format("headrace").options(**topic).mode(
    "append"
).save()
"""


@pytest.mark.spark
def test_spark_finds_the_source_without_registration(tmp_path: Path) -> None:
    require_java()
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("orders", ORDERS)
        with log.producer("orders") as producer:
            producer.append(orders(0, 5))
        environment = os.environ | {
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, check=True, timeout=180
        )
        numbers = log.read("orders").to_table()["order_id"].to_pylist()
    assert sorted(numbers) == sorted([*range(5), *range(5)])
