"""The table of Spark's functions that the package ships, against the installed Spark; and the page
of the documentation that is made from it.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.expressions.signatures import TABLE, table_version

SCRIPTS = Path(__file__).parents[2] / "scripts"
QUICK = 12


def script(name: str) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def stored() -> dict[str, list[str]]:
    """The lines of the table by function."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for line in TABLE.read_text().splitlines()[3:]:
        by_name[line.replace(":", "(").partition("(")[0]].append(line)
    return by_name


def wrong(spark: SparkSession, names: list[str]) -> list[str]:
    """The functions of which Spark says something else than the table."""
    functions = script("spark_functions")
    oracle = functions.Oracle(spark)
    proposed = functions.proposed_by_name()
    table = stored()
    return [
        name
        for name in names
        if functions.describe(oracle, name, proposed.get(name, [])) != table[name]
    ]


def needs_the_version_of_the_table(spark: SparkSession) -> None:
    if not spark.version.startswith(table_version().rpartition(".")[0]):
        pytest.skip(f"the table is of Spark {table_version()}, and this is {spark.version}")


@pytest.mark.spark
def test_the_table_says_what_spark_says_of_some_functions(spark: SparkSession) -> None:
    needs_the_version_of_the_table(spark)
    assert wrong(spark, random.Random(1).sample(sorted(stored()), QUICK)) == []


@pytest.mark.slow
@pytest.mark.spark
def test_the_table_says_what_spark_says_of_every_function(spark: SparkSession) -> None:
    needs_the_version_of_the_table(spark)
    names = script("spark_functions").Oracle(spark).names()
    assert sorted(stored()) == [name for name in names if name.isidentifier()]
    assert wrong(spark, sorted(stored())) == []


def test_the_page_of_functions_is_made_from_the_catalogue() -> None:
    reference = script("function_reference")
    assert reference.PAGE.read_text() == reference.page(), "run scripts/function_reference.py"
