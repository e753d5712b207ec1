"""Operations of PySpark, pandas, Flink and Kafka Streams that people try on a stream or table, and
what to write instead.

`Relation`, `GroupedRows` and `WindowedRows` call `unknown_operation` from `__getattr__`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.errors import UnknownOperation, nearest

_WHERE = "write where('amount > 10')."
_WITH_COLUMNS = "write with_columns(tax='amount * 0.2')."
_GROUP_BY = "write group_by('region').aggregate(total=hr.agg.sum('amount'))."
_FUNCTION = (
    "write Spark SQL, as in with_columns(tax='amount * 0.2'), a function of hr.udf, or"
    " map_batches(function, schema)."
)
_EXPRESSION = (
    "compute columns with Spark SQL, as in with_columns(tax='amount * 0.2'); for Python code per"
    " row use df(), and ingest the result."
)
_SELECT_REST = "select the columns that stay, as in select('order_id', 'amount')."
_RENAME = "write select('*', 'amount AS total'), or select the columns under their new names."
_ORDER = "rows of a stream have no order of their own; for a ranking use top(10, by=…)."
_LIMIT = (
    "a stream has no end; for a look at the newest rows use preview(10), for the first rows by some"
    " order top(10, by=…)."
)
_OVER = "write over('customer_id', rows=10).aggregate(mean=hr.agg.avg('amount'))."
_LAG = "write over('customer_id').aggregate(previous=hr.over.lag('amount'))."
_DEDUPE = "write dedupe(on='order_id', within='1 hour'), or to_table(key) for the newest row."
_UNION = "write union(other)."
_JOIN = "write join(other, on='customer_id')."
_WATERMARK = (
    "declare event time where the topic is declared:"
    " event_time=hr.EventTime('placed_at', delay='10 seconds')."
)
_WRITE = "write pipeline.write('topic', rows), pipeline.view(…) or pipeline.sink(…)."
_SHOW = (
    "declaring computes nothing: look at the newest rows with preview(20); or keep a table with"
    " pipeline.view(…), run the pipeline, and read the view with to_pandas()."
)
_WINDOW = "write window(hr.tumbling('1 minute')).group_by(…).aggregate(…)."
_TO_TABLE = "write to_table('order_id')."

REPLACEMENTS: Mapping[str, str] = {
    # PySpark and pandas
    "filter": _WHERE,
    "query": _WHERE,
    "withColumn": _WITH_COLUMNS,
    "withColumns": _WITH_COLUMNS,
    "with_column": _WITH_COLUMNS,
    "assign": _WITH_COLUMNS,
    "selectExpr": "write select('amount * 2 AS twice').",
    "withColumnRenamed": _RENAME,
    "rename": _RENAME,
    "alias": "give the step a name with name=….",
    "groupBy": _GROUP_BY,
    "groupby": _GROUP_BY,
    "agg": _GROUP_BY,
    "aggregate": _GROUP_BY,
    "count": "write group_by('region').aggregate(n=hr.agg.count()).",
    "sum": _GROUP_BY,
    "map": _FUNCTION,
    "flatMap": "use flat_map(function, schema).",
    "apply": _FUNCTION,
    "transform": _FUNCTION,
    "mapInArrow": "use map_batches(function, schema).",
    "mapInPandas": "use map_batches(function, schema); to_pandas() makes a frame of the table.",
    "foreach": _EXPRESSION,
    "foreachBatch": "use pipeline.sink(…), or df() for a DataFrame of Spark.",
    "drop": _SELECT_REST,
    "fillna": "write with_columns(amount='coalesce(amount, 0.0)').",
    "dropna": "write where('amount IS NOT NULL').",
    "dropDuplicates": _DEDUPE,
    "drop_duplicates": _DEDUPE,
    "dropDuplicatesWithinWatermark": _DEDUPE,
    "distinct": _DEDUPE,
    "orderBy": _ORDER,
    "order_by": _ORDER,
    "sort": _ORDER,
    "sort_values": _ORDER,
    "limit": _LIMIT,
    "head": _LIMIT,
    "take": _LIMIT,
    "nlargest": "write top(10, by='amount').",
    "merge": _JOIN,
    "crossJoin": _JOIN,
    "unionAll": _UNION,
    "unionByName": _UNION,
    "concat": _UNION,
    "append": _UNION,
    "rolling": _OVER,
    "expanding": _OVER,
    "shift": _LAG,
    "lag": _LAG,
    "lead": _LAG,
    "diff": _LAG,
    "row_number": _OVER,
    "rank": _OVER,
    "cumsum": _OVER,
    "resample": _WINDOW,
    "withWatermark": _WATERMARK,
    "write": _WRITE,
    "writeStream": _WRITE,
    "writeTo": _WRITE,
    "toTable": _TO_TABLE,
    "show": _SHOW,
    "display": _SHOW,
    "collect": _SHOW,
    "toPandas": _SHOW,
    "to_pandas": _SHOW,
    "toArrow": _SHOW,
    "to_arrow": _SHOW,
    "cache": "leave it out: state is kept between batches by the steps that need it.",
    "persist": "leave it out: state is kept between batches by the steps that need it.",
    "repartition": "leave it out: rows are shuffled where a step needs it.",
    "columns": "write schema.names.",
    "dtypes": "write schema.",
    "printSchema": "write print(stream.schema).",
    # Flink and Kafka Streams
    "keyBy": "write key_by('customer_id').",
    "groupByKey": _GROUP_BY,
    "selectKey": "write key_by('customer_id').",
    "mapValues": _FUNCTION,
    "peek": "write the rows to a topic with pipeline.write(…), and look at that.",
    "assignTimestampsAndWatermarks": _WATERMARK,
    "to": _WRITE,
    "sinkTo": _WRITE,
    "addSink": _WRITE,
}
"""What to write instead, by the name that was tried. A name that a class does have never gets
here.
"""

TABLE_REPLACEMENTS: Mapping[str, str] = {
    **REPLACEMENTS,
    "orderBy": "write top(10, by='amount') for a ranking; readers of a view order its rows.",
    "order_by": "write top(10, by='amount') for a ranking; readers of a view order its rows.",
    "sort": "write top(10, by='amount') for a ranking; readers of a view order its rows.",
    "sort_values": "write top(10, by='amount') for a ranking; readers of a view order its rows.",
    "limit": "write top(10, by='amount').",
    "head": "write top(10, by='amount').",
    "take": "write top(10, by='amount').",
    "nlargest": "write top(10, by='amount').",
    "dropDuplicates": "write distinct('region').",
    "drop_duplicates": "write distinct('region').",
    "toStream": "write changes().",
    "toChangelogStream": "write changes().",
}

_AGGREGATE = "write aggregate(total=hr.agg.sum('amount'))."
GROUP_REPLACEMENTS: Mapping[str, str] = {
    "agg": _AGGREGATE,
    "sum": _AGGREGATE,
    "apply": "extend hr.agg.CustomAggregate, and write aggregate(score=hr.agg.custom(…)).",
    "count": "write aggregate(n=hr.agg.count()).",
    "size": "write aggregate(n=hr.agg.count()).",
    "avg": "write aggregate(mean=hr.agg.avg('amount')).",
    "mean": "write aggregate(mean=hr.agg.avg('amount')).",
    "min": "write aggregate(low=hr.agg.min('amount')).",
    "max": "write aggregate(high=hr.agg.max('amount')).",
    "groupBy": "write group_by('region').",
    "groupby": "write group_by('region').",
    "window": "call window(…) first: window(hr.tumbling('1 minute')).group_by(…).aggregate(…).",
    "windowedBy": "call window(…) first: window(hr.tumbling('1 minute')).group_by(…).aggregate(…).",
    "allowedLateness": "write window(…, late=hr.late.correct('1 hour')).",
    "sideOutputLateData": "write window(…, late=hr.late.divert('late_rows')).",
}


def unknown_operation(
    what: str, name: str, replacements: Mapping[str, str], operations: Iterable[str]
) -> UnknownOperation:
    """The error for an attribute that does not exist: what to write instead, or the nearest name.

    Args:
        what: What the attribute was asked of, such as "The stream orders.where".
        name: The name that was tried.
        replacements: What to write instead, by name.
        operations: The names that there are, for a suggestion.
    """
    if name in replacements:
        return UnknownOperation(f"{what} has no {name!r}.", fix=replacements[name])
    return UnknownOperation(f"{what} has no {name!r}: {nearest(name, operations)}")


def operations_of(kind: type) -> list[str]:
    """The public names of a class."""
    return [name for name in dir(kind) if not name.startswith("_")]
