"""Writes `docs/reference/functions.md` from the catalogue of functions.

    python scripts/function_reference.py

A test compares the page with what this writes.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from headrace.expressions.functions import SPECIAL_NAMES
from headrace.expressions.lambdas import EXAMPLES
from headrace.expressions.refusals import NOT_DETERMINISTIC, REFUSED, SYNONYMS, refusal
from headrace.expressions.signatures import function_kinds, signatures, table_version
from headrace.expressions.time_units import UNITS

PAGE = Path(__file__).parents[1] / "docs/reference/functions.md"
OPENING = """\
# Functions in expressions

Expressions call the built-in functions of Spark SQL: all that are deterministic, answer one
row, and have a type that a column can have. Types are known when the pipeline is declared,
without Spark; the table that says so was made by asking Spark {version}. Functions of your own
are called in the same way: [Python functions](../how-to/functions.md).

Where a call fails on a row, its result is null, and the row is counted, diverted or ends the
run, as `errors=` of the step says. That holds for functions that raise in Spark too, such as
`conv` and `map_from_arrays`, and within lambdas. What is wrong for every row is an error at
once: a pattern that cannot be read, a format, a time zone. `repeat` and `space` make at most a
megabyte, `sequence`, `array_repeat` and `array_insert` at most 100,000 elements more; beyond
that a call fails. `LIKE ANY`, `LIKE ALL` and `ESCAPE` are understood. Some functions are
computed in Arrow, where the result is certainly Spark's, the others by Spark.
"""
LEGEND = """\
`NUMBER` is any number, `INTEGER` any whole one, `TIME` a date or timestamp, `T`, `K` and `V` any
type, the same wherever the letter stands. What is in brackets may be left out.
"""


def page() -> str:
    """The text of the page."""
    parts = [
        OPENING.format(version=table_version()),
        "## With signatures\n",
        LEGEND,
        "| function | takes | gives |\n|---|---|---|",
    ]
    lines = signatures()
    for name in sorted(lines):
        if name not in REFUSED and name not in NOT_DETERMINISTIC:
            parts += [_row(name, each) for each in dict.fromkeys(map(str, lines[name]))]
    parts += [
        "",
        "## With rules of their own\n",
        "Their types follow from those of the arguments.\n",
    ]
    special = sorted(SPECIAL_NAMES - set(EXAMPLES) - set(lines))
    parts += [", ".join(f"`{name}`" for name in special) + ".\n", "## With lambdas\n", "```sql"]
    parts += [EXAMPLES[name] for name in sorted(EXAMPLES)]
    parts += [
        "```\n",
        "## With units\n",
        "`timestampdiff(HOUR, sent_at, arrived_at)`, `timestampadd(DAY, 3, at)`, and `datediff`,"
        " `date_diff`, `dateadd`, `date_add` with three arguments. Units are "
        + ", ".join(f"`{unit}`" for unit in UNITS)
        + ".\n",
        "## Refused\n",
        "| function | why | instead |\n|---|---|---|",
    ]
    parts += list(_refused())
    parts += ["", "## What other systems call it\n", "| there | here |\n|---|---|"]
    by_answer: dict[str, list[str]] = defaultdict(list)
    for name, answer in SYNONYMS.items():
        if refusal(answer, function_kinds().get(answer)) is None:
            by_answer[answer].append(name)
    parts += [
        f"| {', '.join(f'`{name}`' for name in names)} | `{answer.replace('|', chr(92) + '|')}` |"
        for answer, names in by_answer.items()
    ]
    return "\n".join(parts) + "\n"


def _row(name: str, shown: str) -> str:
    takes = shown.removeprefix(name)[1:-1].replace("|", " or ")
    found = {each.result for each in signatures()[name] if str(each) == shown}
    shown_takes = f"`{takes}`" if takes else "nothing"
    return f"| `{name}` | {shown_takes} | `{' or '.join(sorted(found))}` |"


def _refused() -> list[str]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, instead in NOT_DETERMINISTIC.items():
        groups["is not deterministic", instead].append(name)
    for name, (why, instead) in REFUSED.items():
        groups[why, instead].append(name)
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, kind in function_kinds().items():
        if name not in REFUSED and name not in SPECIAL_NAMES and name not in NOT_DETERMINISTIC:
            kinds[kind].append(name)
    groups["looks at more than one row", "group_by(…).aggregate(…) with hr.agg"] += kinds[
        "aggregate"
    ]
    groups["looks at more than one row", "over(…) with hr.over, window(…)"] += kinds["window"]
    groups["makes several rows of one", "stream.explode(…), stream.flat_map(…)"] += kinds[
        "generator"
    ]
    return [
        f"| {', '.join(f'`{name}`' for name in names)} | {why} | {instead.rstrip('.')} |"
        for (why, instead), names in groups.items()
        if names
    ]


if __name__ == "__main__":
    PAGE.write_text(page())
