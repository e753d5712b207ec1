"""Asks a real Spark session what each of its functions takes and returns, and writes the table that
the package ships: `src/headrace/expressions/spark_functions.txt`.

    python scripts/spark_functions.py            writes the table
    python scripts/spark_functions.py --check    compares it with the installed Spark

Spark is asked, not executed: a call over columns of every type is analyzed, and Spark says whether
it takes them as they are, what the result's type is, and whether it is deterministic. Arguments of
plain types are found by trying all of them. For arrays and maps the script proposes signatures with
type variables, and keeps those that Spark confirms for several element types. What may be given as
a literal only is found by trying a column first.

What Spark cannot be asked is in `headrace.expressions.catalogue`: whether a function can fail on a
row, which literals fail on every row, and what is refused.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.expressions.functions import SPECIAL_NAMES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLE = Path(__file__).parents[1] / "src/headrace/expressions/spark_functions.txt"
FORMAT = 1
PLAIN = {
    "BOOLEAN": "true",
    "TINYINT": "1Y",
    "SMALLINT": "1S",
    "INT": "1",
    "BIGINT": "1L",
    "FLOAT": "1.0F",
    "DOUBLE": "1.0D",
    "DECIMAL(10,2)": "CAST(1 AS DECIMAL(10,2))",
    "STRING": "'1'",
    "BINARY": "X'31'",
    "DATE": "DATE'2026-01-31'",
    "TIMESTAMP": "TIMESTAMP'2026-01-31 12:00:00'",
    "TIMESTAMP_NTZ": "TIMESTAMP_NTZ'2026-01-31 12:00:00'",
    "INTERVAL DAY TO SECOND": "INTERVAL '1 00:00:00' DAY TO SECOND",
    "INTERVAL YEAR TO MONTH": "INTERVAL '1-1' YEAR TO MONTH",
    "VARIANT": "parse_json('1')",
    "GEOMETRY(4326)": "CAST(NULL AS GEOMETRY(4326))",
    "GEOGRAPHY(4326)": "CAST(NULL AS GEOGRAPHY(4326))",
}
"""The types that are tried, and a literal of each."""
INTEGERS = ("TINYINT", "SMALLINT", "INT", "BIGINT")
NUMBERS = (*INTEGERS, "FLOAT", "DOUBLE", "DECIMAL(10,2)")
TIMES = ("DATE", "TIMESTAMP", "TIMESTAMP_NTZ")
ELEMENTS = ("INT", "STRING", "DATE", "STRUCT<a: INT>")
MOST_COMBINATIONS = 400

KINDS = {
    "agg_funcs": "aggregate",
    "window_funcs": "window",
    "generator_funcs": "generator",
    "table_funcs": "table",
}
SKETCH_AGGREGATE = re.compile(r"_agg|_accumulate|_combine|approx_top_k$|count_min_sketch|histogram")

# Signatures over arrays, maps and more, which Spark confirms or not.
PROPOSED = """
array_append(ARRAY<T>, T) -> ARRAY<T>
array_compact(ARRAY<T>) -> ARRAY<T>
array_contains(ARRAY<T>, T) -> BOOLEAN
array_distinct(ARRAY<T>) -> ARRAY<T>
array_except(ARRAY<T>, ARRAY<T>) -> ARRAY<T>
array_insert(ARRAY<T>, INT, T) -> ARRAY<T>
array_intersect(ARRAY<T>, ARRAY<T>) -> ARRAY<T>
array_join(ARRAY<STRING>, STRING, [STRING]) -> STRING
array_max(ARRAY<T>) -> T
array_min(ARRAY<T>) -> T
array_position(ARRAY<T>, T) -> BIGINT
array_prepend(ARRAY<T>, T) -> ARRAY<T>
array_remove(ARRAY<T>, T) -> ARRAY<T>
array_repeat(T, INT) -> ARRAY<T>
array_size(ARRAY<T>) -> INT
array_sort(ARRAY<T>) -> ARRAY<T>
array_union(ARRAY<T>, ARRAY<T>) -> ARRAY<T>
arrays_overlap(ARRAY<T>, ARRAY<T>) -> BOOLEAN
bitmap_count(BINARY) -> BIGINT
cardinality(ARRAY<T>) -> INT
cardinality(MAP<K, V>) -> INT
concat_ws(STRING, STRING|ARRAY<STRING>...) -> STRING
elt(INT, STRING...) -> STRING
elt(INT, BINARY...) -> BINARY
flatten(ARRAY<ARRAY<T>>) -> ARRAY<T>
format_string(STRING, ANY...) -> STRING
printf(STRING, ANY...) -> STRING
get(ARRAY<T>, INT) -> T
hash(ANY...) -> INT
make_dt_interval([INT], [INT], [INT], [NUMBER]) -> INTERVAL DAY TO SECOND
make_timestamp(INT, INT, INT, INT, INT, NUMBER, [STRING]) -> TIMESTAMP
make_timestamp_ltz(INT, INT, INT, INT, INT, NUMBER, [STRING]) -> TIMESTAMP
make_timestamp_ntz(INT, INT, INT, INT, INT, NUMBER) -> TIMESTAMP_NTZ
try_make_timestamp(INT, INT, INT, INT, INT, NUMBER, [STRING]) -> TIMESTAMP
try_make_timestamp_ltz(INT, INT, INT, INT, INT, NUMBER, [STRING]) -> TIMESTAMP
try_make_timestamp_ntz(INT, INT, INT, INT, INT, NUMBER) -> TIMESTAMP_NTZ
map_contains_key(MAP<K, V>, K) -> BOOLEAN
map_entries(MAP<K, V>) -> ARRAY<STRUCT<key: K, value: V>>
map_keys(MAP<K, V>) -> ARRAY<K>
map_values(MAP<K, V>) -> ARRAY<V>
reverse(STRING) -> STRING
reverse(ARRAY<T>) -> ARRAY<T>
sentences(STRING, [STRING], [STRING]) -> ARRAY<ARRAY<STRING>>
shuffle(ARRAY<T>) -> ARRAY<T>
size(ARRAY<T>) -> INT
size(MAP<K, V>) -> INT
slice(ARRAY<T>, INT, INT) -> ARRAY<T>
sort_array(ARRAY<T>, [BOOLEAN#literal]) -> ARRAY<T>
try_element_at(ARRAY<T>, INT) -> T
try_element_at(MAP<K, V>, K) -> V
vector_avg(ARRAY<FLOAT>) -> ARRAY<FLOAT>
vector_cosine_similarity(ARRAY<FLOAT>, ARRAY<FLOAT>) -> FLOAT
vector_inner_product(ARRAY<FLOAT>, ARRAY<FLOAT>) -> FLOAT
vector_l2_distance(ARRAY<FLOAT>, ARRAY<FLOAT>) -> FLOAT
vector_norm(ARRAY<FLOAT>, [FLOAT]) -> FLOAT
vector_normalize(ARRAY<FLOAT>, [FLOAT]) -> ARRAY<FLOAT>
vector_sum(ARRAY<FLOAT>) -> ARRAY<FLOAT>
xxhash64(ANY...) -> BIGINT
"""
OWN_RULES = SPECIAL_NAMES | {"and", "or", "not", "between", "in", "when"}
VARIABLES = {"T": ELEMENTS, "K": ("STRING", "INT"), "V": ("INT", "STRUCT<a: INT>")}


@dataclass(frozen=True)
class Answer:
    """What Spark says of a call: the result's type, whether it is deterministic, and the columns
    that it casts.
    """

    type: str
    deterministic: bool
    casts: frozenset[str]
    node: str


class Oracle:
    """Asks a session. All calls of one question are analyzed as one projection."""

    def __init__(self, spark: SparkSession) -> None:
        logging.getLogger("SQLQueryContextLogger").disabled = True
        self.spark = spark
        self._jvm: Any = spark._jvm  # noqa: SLF001
        session: Any = spark._jsparkSession  # type: ignore[attr-defined]  # noqa: SLF001
        self._state = session.sessionState()
        self._columns: dict[str, str] = {}
        self.add_types(PLAIN)

    def add_types(self, types: Iterable[str]) -> None:
        """Make a column of each type that calls can read."""
        before = len(self._columns)
        for kind in types:
            self._columns.setdefault(kind, f"c{len(self._columns)}")
        if len(self._columns) > before:
            nulls = (f"CAST(NULL AS {kind}) AS {name}" for kind, name in self._columns.items())
            self.spark.sql(f"SELECT {', '.join(nulls)}").createOrReplaceTempView("probe")

    def column(self, kind: str) -> str:
        return self._columns[kind]

    def names(self) -> list[str]:
        return sorted(row[0] for row in self.spark.sql("SHOW FUNCTIONS").collect())

    def group(self, name: str) -> str:
        identifier = self._jvm.org.apache.spark.sql.catalyst.FunctionIdentifier(name)
        return str(self._state.catalog().lookupFunctionInfo(identifier).getGroup())

    def ask(self, calls: Sequence[str]) -> list[Answer | str | None]:
        """What Spark says of each call; None if its arguments do not fit, a text if it is refused
        before they are looked at.
        """
        if not calls:
            return []
        text = ", ".join(f"{call} AS x{position}" for position, call in enumerate(calls))
        try:
            plan = self._state.sqlParser().parsePlan(f"SELECT {text} FROM probe")  # noqa: S608
            analyzed = self._state.analyzer().execute(plan)
        except Exception as error:
            if len(calls) == 1:
                return [str(error).partition("\n")[0]]
            half = len(calls) // 2
            return [*self.ask(calls[:half]), *self.ask(calls[half:])]
        node = str(analyzed.nodeName())
        if node != "Project" and len(calls) > 1:
            return [answer for call in calls for answer in self.ask([call])]
        return list(self._answers(analyzed, node, len(calls)))

    def _answers(self, analyzed: Any, node: str, count: int) -> Iterator[Answer | None]:
        expressions = analyzed.expressions()
        try:
            optimizer = self._jvm.org.apache.spark.sql.catalyst.optimizer
            shown = optimizer.ReplaceExpressions.apply(analyzed).expressions()
        except Exception:  # not for what cannot be resolved
            shown = expressions
        for position in range(count):
            expression = expressions.apply(position)
            if not expression.resolved():
                yield None
                continue
            try:
                kind = _plain_name(str(expression.dataType().sql()))
            except Exception:  # Spark finds out late that the types do not fit
                yield None
                continue
            casts = re.findall(r"cast\((c\d+)#", shown.apply(position).toString())
            yield Answer(kind, bool(expression.deterministic()), frozenset(casts), node)


def _plain_name(kind: str) -> str:
    """A type as the table writes it."""
    return re.sub(r"(\w+): ", r"\1: ", kind).replace(" NOT NULL", "")


# Functions of plain types


class Inference:
    """The signatures of one function, found by trying types."""

    def __init__(self, oracle: Oracle, name: str) -> None:
        self.oracle, self.name = oracle, name
        self.deterministic = True

    def lines(self) -> list[str]:
        found: list[str] = []
        counts, repeats = self._arities()
        for count in counts:
            found += self._of_count(count, repeats=repeats and count == counts[-1])
        return found

    def _arities(self) -> tuple[list[int], bool]:
        """How many arguments Spark takes, and whether there may be more."""
        for arguments in ("NULL, " * 30, ""):
            answer = self.oracle.ask([f"{self.name}({arguments.removesuffix(', ')})"])[0]
            if isinstance(answer, str) and (
                match := re.search(r"requires (?:at least )?(.*?) parameter", answer)
            ):
                numbers = [int(each) for each in re.findall(r"\d+", match[1])]
                if ">" in match[1]:
                    return [numbers[0] + 1], True
                if "at least" in match[0]:
                    return [max(numbers[0], 1)], True
                return list(range(numbers[0], numbers[-1] + 1)), False
        return [0, 1, 2, 3], False

    def _of_count(self, count: int, *, repeats: bool) -> list[str]:
        if count == 0:
            answer = self.oracle.ask([f"{self.name}()"])[0]
            if not isinstance(answer, Answer):
                return []
            self.deterministic &= answer.deterministic
            return [f"{self.name}() -> {answer.type}"]
        for literal in self._literal_positions(count):
            if accepted := self._accepted(count, literal):
                return list(self._written(accepted, literal, repeats=repeats))
        return []

    def _literal_positions(self, count: int) -> Iterator[tuple[int, ...]]:
        """Sets of positions where literals stand, smallest first; later positions first."""
        for size in range(min(count, 4) + 1):
            yield from itertools.combinations(range(count - 1, -1, -1), size)

    def _call(self, kinds: Sequence[str | None], literal: Sequence[int]) -> str:
        arguments = [
            "NULL"
            if kind is None
            else PLAIN[kind]
            if position in literal
            else self.oracle.column(kind)
            for position, kind in enumerate(kinds)
        ]
        return f"{self.name}({', '.join(arguments)})"

    def _accepted(self, count: int, literal: tuple[int, ...]) -> dict[tuple[str, ...], str]:
        """The types that are taken without a cast, and the result's."""
        options: list[list[str]] = []
        for position in range(count):
            calls = [
                self._call([kind if each == position else None for each in range(count)], literal)
                for kind in PLAIN
            ]
            fitting = [
                kind
                for kind, answer in zip(PLAIN, self.oracle.ask(calls), strict=True)
                if isinstance(answer, Answer) and self.oracle.column(kind) not in answer.casts
            ]
            options.append(fitting)
        if not all(options):
            if count > 2:
                return {}
            options = [list(PLAIN)] * count
        combinations = list(itertools.islice(itertools.product(*options), MOST_COMBINATIONS))
        answers = self.oracle.ask([self._call(each, literal) for each in combinations])
        accepted = {}
        for kinds, answer in zip(combinations, answers, strict=True):
            if isinstance(answer, Answer) and not answer.casts:
                self.deterministic &= answer.deterministic
                accepted[kinds] = answer.type
        return accepted

    def _written(
        self, accepted: dict[tuple[str, ...], str], literal: tuple[int, ...], *, repeats: bool
    ) -> Iterator[str]:
        for sets, result in _boxes(accepted):
            parameters = [
                _union(_uncast(kinds)) + "#literal" if position in literal else _union(kinds)
                for position, kinds in enumerate(sets)
            ]
            dots = "..." if repeats else ""
            yield f"{self.name}({', '.join(parameters)}{dots}) -> {result}"


def _boxes(accepted: dict[tuple[str, ...], str]) -> list[tuple[list[tuple[str, ...]], str]]:
    """Combinations of types as few products of sets with one result each."""
    if not next(iter(accepted)):
        return [([], next(iter(accepted.values())))]
    by_first: dict[str, dict[tuple[str, ...], str]] = defaultdict(dict)
    for kinds, result in accepted.items():
        by_first[kinds[0]][kinds[1:]] = result
    alike: dict[frozenset[tuple[tuple[str, ...], str]], list[str]] = defaultdict(list)
    for kind, rest in by_first.items():
        for result in dict.fromkeys(rest.values()):
            alike[frozenset((key, value) for key, value in rest.items() if value == result)].append(
                kind
            )
    return [
        ([tuple(first), *others], result)
        for rest, first in alike.items()
        for others, result in _boxes(dict(sorted(rest)))
    ]


def _uncast(kinds: Sequence[str]) -> list[str]:
    """The types of a literal; that Spark casts a text to a number cannot be seen of literals."""
    return [kind for kind in kinds if kind != "STRING" or "INT" not in kinds]


def _union(kinds: Sequence[str]) -> str:
    """A set of types, by class where a whole class is in it."""
    left, words = list(kinds), []
    for word, members in (("NUMBER", NUMBERS), ("INTEGER", INTEGERS), ("TIME", TIMES)):
        if set(members) <= set(left):
            words.append(word)
            left = [kind for kind in left if kind not in members]
    named = (re.sub(r"^(DECIMAL|GEOMETRY|GEOGRAPHY)\(.*", r"\1", kind) for kind in left)
    return "|".join([*words, *named])


# Functions over arrays and maps


def confirmed(oracle: Oracle, line: str) -> str | None:
    """What a function is by a signature with type variables, which is tried with several types of
    each: the line itself, "aggregate" or "not deterministic"; None if Spark does not take it.
    """
    match = re.fullmatch(r"(\w+)\((.*?)(\.\.\.)?\) -> (.*)", line)
    assert match is not None, line
    parameters = [
        part.strip() for part in re.findall(r"(?:[^,<]|<(?:[^<>]|<[^<>]*>)*>)+", match[2])
    ]
    used = [name for name in VARIABLES if re.search(rf"\b{name}\b", line)]
    kind: str | None = None
    for values in itertools.product(*(VARIABLES[name] for name in used)):
        bound = dict(zip(used, values, strict=True))
        kinds = [
            substitute(part.strip("[]").partition("#")[0].split("|")[0], bound)
            for part in parameters
        ]
        oracle.add_types(kinds)
        literal = ["#" in part for part in parameters]
        arguments = [
            PLAIN[kind] if is_literal else oracle.column(kind)
            for kind, is_literal in zip(kinds, literal, strict=True)
        ]
        answer = oracle.ask([f"{match[1]}({', '.join(arguments)})"])[0]
        if not isinstance(answer, Answer):
            continue
        if answer.node != "Project":
            return "aggregate"
        casts = answer.casts and "NUMBER" not in line
        if answer.type != _plain_name(substitute(match[4], bound)) or casts:
            return None
        kind = line if answer.deterministic else "not deterministic"
    return kind


def substitute(pattern: str, bound: dict[str, str]) -> str:
    """A pattern with types in the place of its variables."""
    pattern = {"ANY": "INT", "NUMBER": "DOUBLE", "INTEGER": "INT"}.get(pattern, pattern)
    for name, kind in bound.items():
        pattern = re.sub(rf"\b{name}\b(?!:)", kind, pattern)
    return pattern


# The table


def table(spark: SparkSession) -> str:
    """The table of the installed Spark, as text."""
    oracle, proposed = Oracle(spark), proposed_by_name()
    entries: dict[str, list[str]] = {}
    for name in oracle.names():
        if re.fullmatch(r"\w+", name):
            entries[name] = describe(oracle, name, proposed.get(name, []))
            print(name, entries[name], file=sys.stderr)
    lines = [line for name in sorted(entries) for line in entries[name]]
    head = [
        "# What Spark's functions take and return. Made by scripts/spark_functions.py.",
        f"format {FORMAT}",
        f"spark {spark.version}",
    ]
    return "\n".join([*head, *lines]) + "\n"


def proposed_by_name() -> dict[str, list[str]]:
    """The proposed signatures of each function."""
    proposed: dict[str, list[str]] = defaultdict(list)
    for line in filter(None, PROPOSED.splitlines()):
        proposed[line.partition("(")[0]].append(line)
    return proposed


def describe(oracle: Oracle, name: str, proposed: Sequence[str]) -> list[str]:
    """The lines of one function: its signatures, or what it is if it has none for a row."""
    group = oracle.group(name)
    if name in OWN_RULES:
        return [f"{name}: rules of its own"]
    if group in KINDS:
        return [f"{name}: {KINDS[group]}"]
    if group == "sketch_funcs" and SKETCH_AGGREGATE.search(name):
        return [f"{name}: aggregate"]
    if proposed:
        found = [kind for line in proposed if (kind := confirmed(oracle, line)) is not None]
        return [kind if "(" in kind else f"{name}: {kind}" for kind in found] or [
            f"{name}: special"
        ]
    inference = Inference(oracle, name)
    lines = inference.lines()
    if not inference.deterministic:
        return [f"{name}: not deterministic"]
    return lines or [f"{name}: special"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    import headrace as hr

    made = table(hr.spark())
    if not arguments.check:
        TABLE.write_text(made)
    elif made != TABLE.read_text():
        sys.exit(f"{TABLE} differs from Spark. To fix: run {Path(__file__).name} and review it.")


if __name__ == "__main__":
    main()
