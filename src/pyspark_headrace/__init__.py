"""Lets Spark find `format("headrace")` by itself, in any session whose Python can import this
module.

When Spark first looks up a Python data source, it imports every top-level module whose name begins
with `pyspark_` and registers the class `DefaultSource` in it. A source that is found in this way
cannot be replaced. `hr.spark()` registers the source itself, so that relative addresses start from
the directory in which it was called; it hides this one by an environment variable of the JVM that
it starts.
"""

import os

from headrace.log.spark.jvm import HIDE_DEFAULT_SOURCE
from headrace.log.spark.source import TopicSource

__all__ = ["DefaultSource"]

if HIDE_DEFAULT_SOURCE not in os.environ:

    class DefaultSource(TopicSource):
        """The data source `headrace`. A relative `file:` address starts from the directory in which
        Spark was started.
        """

        home = os.getcwd()  # noqa: PTH109 - Spark's options are text
