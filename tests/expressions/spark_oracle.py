"""Compares what `expressions` says without Spark with Spark itself, over `edge_case_rows`."""

from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_type

from headrace.expressions.expression import Expression, parse_expression
from tests.expressions.edge_case_rows import SCHEMA, comparable


def parsed(text: str) -> Expression:
    return parse_expression(text, SCHEMA, where="expression")


def wrong_types(rows: DataFrame, expressions: list[Expression]) -> list[str]:
    forms = [form for each in expressions for form in (each.sql, each.safe)]
    fields = list(
        rows.selectExpr(*(f"{form} AS c{index}" for index, form in enumerate(forms))).schema
    )
    wanted = [
        from_arrow_type(each.type, prefer_timestamp_ntz=True).simpleString()
        for each in expressions
        for _ in range(2)
    ]
    found = [field.dataType.simpleString() for field in fields]
    return [
        f"{expressions[index // 2].text}: parsed {want}, Spark {got}"
        for index, (want, got) in enumerate(zip(wanted, found, strict=True))
        if want != got
    ]


def wrong_values(rows: DataFrame, expressions: list[Expression]) -> list[str]:
    """All in one job. Where `failed` says no, the expression is computed as it was written; if that
    fails, so does the job, naming it.
    """
    columns = []
    for index, each in enumerate(expressions):
        fails = each.failed or "false"
        columns += [
            f"{each.safe} AS safe{index}",
            f"{fails} AS failed{index}",
            f"CASE WHEN NOT {fails} THEN {each.text} END AS plain{index}",
        ]
    made = rows.orderBy("id").selectExpr(*columns).toArrow()
    wrong = []
    for index, each in enumerate(expressions):
        failures = made.column(f"failed{index}").to_pylist()
        assert None not in failures, each.text
        pairs = zip(
            failures,
            comparable(made.column(f"safe{index}")),
            comparable(made.column(f"plain{index}")),
            strict=True,
        )
        wrong += [
            f"{each.text}: row {row}: {safe!r}, not {plain!r}"
            for row, (fails, safe, plain) in enumerate(pairs)
            if not fails and safe != plain
        ]
    return wrong
