"""What an output means has every setting of every step upstream that decides its rows: a setting
that a meaning lacks can be edited, and rows of both definitions stand beside each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

import headrace as hr
from headrace.errors import HeadraceError
from headrace.plan.meanings import Meaning, output_meaning
from headrace.plan.plan import Step, ViewOutput

CLICKS = (
    "id BIGINT NOT NULL, k STRING, j STRING, v BIGINT, w BIGINT, at TIMESTAMP, due TIMESTAMP,"
    " title STRING, body STRING"
)


class Scaled(hr.agg.CustomAggregate):
    """A custom aggregate with a setting."""

    state_type = result_type = pa.float64()

    def __init__(self, by: float) -> None:
        self.by = by

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        return states

    def result(self, states: pa.Array) -> pa.Array:
        return states


class Totals(hr.Processor, each_key=True):
    """A processor with a setting, a value and a timer."""

    output = "k STRING, total BIGINT, at TIMESTAMP"
    total = hr.state("BIGINT", default=0)
    quiet = hr.timer()

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def on_row(self, row: dict[str, Any], ctx: Any) -> None: ...

    def on_others(self, row: dict[str, Any], ctx: Any) -> None: ...

    def on_timer(self, key: dict[str, Any], ctx: Any) -> None: ...


class Sided(hr.Processor, each_key=True):
    """A processor with a table and a side output."""

    output = "k STRING, id BIGINT, v BIGINT"
    table_key = ("k", "id")
    odd = hr.side_output("k STRING, w BIGINT")

    def on_row(self, row: dict[str, Any], ctx: Any) -> None: ...


@hr.udf("BIGINT", name="test_tripled", each_row=True)
def tripled(value: int, other: int) -> int:
    return 3 * value + other


def copies(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row, row]


async def scores(row: dict[str, Any]) -> dict[str, Any]:
    return {"score": 1.0}


def country_file() -> Any:
    folder = Path(tempfile.mkdtemp())
    path = folder / "countries.csv"
    path.write_text("k,country,size\na,Norway,1\n")
    table = hr.file_table(path, schema="k STRING, country STRING, size INT", key="k")
    path.unlink()
    folder.rmdir()
    return table


def examples() -> hr.Pipeline:
    """A pipeline with each kind of step, and with each kind of each setting."""
    pipeline = hr.Pipeline("all")
    shed = hr.shed(behind=10)
    clicks = pipeline.topic(
        "clicks", shed=shed, schema=CLICKS, key="k", event_time=hr.EventTime("at", producer="j")
    )
    others = pipeline.topic("others", schema=CLICKS, key="k", event_time=hr.EventTime("at"))
    items = pipeline.table(
        "items", schema=CLICKS, key="id", event_time=hr.EventTime("at", delay="1 second")
    )
    devices = pipeline.topic(
        "devices",
        schema="k STRING, j STRING, a TIMESTAMP, b TIMESTAMP, c TIMESTAMP, d TIMESTAMP",
        event_time=hr.device_time(event="a", sent="b", received="c", device="k"),
    )
    pings = pipeline.topic("pings", schema="k STRING", event_time=hr.processing_time())
    rules = pipeline.table("rules", schema="k STRING, pattern STRING, define STRING", key="k")
    queries = pipeline.table("queries", schema="id BIGINT, q STRING, r STRING, o STRING", key="id")
    day: dict[str, Any] = {"late": hr.late.correct("1 hour"), "emit": "changes"}
    windows = clicks.window(hr.tumbling("1 hour"), late=hr.late.drop()).group_by("k", "j")
    hours = windows.aggregate(n=hr.agg.count(), name="hours")
    sided = clicks.process(Sided, key="k")
    outputs: dict[str, Any] = {
        "devices": devices,
        "pings": pings,
        "select": clicks.select("id", "k", x="v + 1"),
        "where": clicks.where("v > 1"),
        "where_table": items.where("v > 1").with_columns(x="w"),
        "key_by": clicks.key_by("j"),
        "aggregate": clicks.group_by("k", "j").aggregate(
            n=hr.agg.sum("v", where="w > 0"),
            d=hr.agg.count_distinct("v", "w"),
            q=hr.agg.quantiles("v", at=[0.5, 0.9]),
            b=hr.agg.max_by("v", "w"),
            e=hr.agg.decayed_sum("v", half_life="1 hour"),
            c=hr.agg.custom(Scaled(2.0), "v"),
            ttl="1 day",
        ),
        "union": clicks.union(others),
        "dedupe": clicks.dedupe(on=["k", "j"], within="1 hour"),
        "to_table": clicks.to_table("k", by="w", ttl="1 day"),
        "changes": items.changes(),
        "hours": hours,
        "hopping": clicks.window(hr.hopping("1 hour", every="30 minutes", offset="1 minute"), **day)
        .group_by("k", "j")
        .aggregate(n=hr.agg.sum("v")),
        "sliding": clicks.window(hr.sliding("1 hour"), late=hr.late.divert("late"))
        .group_by("k", "j")
        .aggregate(n=hr.agg.sum("v")),
        "sessions": clicks.window(hr.session("1 hour"))
        .group_by("k", "j")
        .aggregate(n=hr.agg.count()),
        "zones": clicks.window(hr.tumbling("1 day", timezone="Europe/Berlin"))
        .group_by("k", "j")
        .aggregate(n=hr.agg.count()),
        "items_hours": items.window(hr.tumbling("1 hour"))
        .group_by("k", "j")
        .aggregate(n=hr.agg.count()),
        "compare": hours.compare("1 day"),
        "top": items.top(3, by=["v", "w ASC"], per="k"),
        "rank": clicks.top(3, by=["v", "w ASC"], per="k"),
        "distinct": items.distinct("k", "j"),
        "join": clicks.join(others, on="k", within="1 hour", how="left", suffix="_r"),
        "until": clicks.join(others, on="k", until="due", since="at", before="1 hour", suffix="_r"),
        "as_of": clicks.join(items.as_of("at", history="1 day"), on="id", how="left", suffix="_r"),
        "corrected": clicks.join(
            items.as_of("at", history="1 day"), on="id", suffix="_r", late_versions="correct"
        ),
        "history": items.history(kept="1 day"),
        "match": clicks.match(
            "a b+",
            define={"a": "v > 1", "b": "b.v > a.v"},
            measures={"x": "first(a.v)"},
            subsets={"u": ["a", "b"]},
            within="1 hour",
            order_by=["v", "w desc"],
        ),
        "rules": clicks.match(rules, measures={"x": "first(v)"}, within="1 hour"),
        "search": clicks.search(
            queries, query="q", text=["title", "body"], filters=["v"], highlights=True, suffix="_q"
        ),
        "calls": clicks.with_columns(x="test_tripled(v, w) + test_tripled(w, v)"),
        "answered": clicks.call(scores, "score DOUBLE"),
        "mapped": clicks.flat_map(copies, "id BIGINT, k STRING"),
        "exploded": clicks.select("k", words="split(title, ' ')").explode("words", "word"),
        "processed": clicks.process(Totals(2), key="k", ttl="1 day", others=others),
        "sided": sided,
        "odd": sided.side("odd"),
        "sampled": clicks.sample(0.5, by="k"),
        "over": clicks.over("k", order_by="v", rows=3, gap="1 hour").aggregate(
            total=hr.agg.sum("v"), before=hr.over.lag("w")
        ),
        "recent": clicks.over(["k", "j"], range="1 hour").aggregate(total=hr.agg.sum("v")),
        "countries": clicks.join(country_file(), on="k", how="left", suffix="_c"),
        "gather": clicks.search(
            queries, query="q", text="title", per="document", language="english", suffix="_q"
        ),
    }
    for name, rows in outputs.items():
        (pipeline.view if rows.step.is_table else pipeline.write)(f"{name}_output", rows)
    pipeline.view("kept", hours, keep="1 day")
    pipeline.alert("held", items.where("v > 2"), for_="1 hour")
    return pipeline


def step_classes(base: type[Step] = Step) -> Iterator[type[Step]]:
    for found in base.__subclasses__():
        yield found
        yield from step_classes(found)


def with_field(value: Any, name: str, other: Any) -> Any:
    """A copy of a dataclass in which one field is another, without what is cached of it."""
    changed = object.__new__(type(value))
    for field in fields(value):
        object.__setattr__(changed, field.name, getattr(value, field.name))
    object.__setattr__(changed, name, other)
    return changed


def variants(value: Any, annotation: str, columns: list[str]) -> Iterator[tuple[str, Any]]:
    """Values in which one thing differs, each with the path to it."""
    if callable(value) and not isinstance(value, type):
        return  # code: its fingerprint is a field of its own
    if value is None:
        yield "", 7 if "int" in annotation else "another"
    elif isinstance(value, bool):
        yield "", not value
    elif isinstance(value, int | float):
        yield "", value + 1
    elif isinstance(value, str):
        yield "", next((c for c in columns if value in columns and c != value), f"{value}2")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            if isinstance(item, tuple) and len(item) == 2 and item[0] == item[1]:
                continue  # a column as it is
            for path, other in variants(item, annotation, columns):
                yield f"[]{path}", (*value[:index], other, *value[index + 1 :])
        if len(set(value)) > 1:
            yield "[order]", value[::-1]
    elif isinstance(value, frozenset):
        yield "", value | {"another"}
    elif isinstance(value, pa.DataType):
        yield "", pa.binary() if value != pa.binary() else pa.string()
    elif isinstance(value, pa.Schema):
        yield "", pa.schema([*list(value)[:-1], pa.field("another", pa.int8())])
    elif is_dataclass(value) and not isinstance(value, Step):
        for field in fields(value):
            if not field.name.startswith("_"):
                below = variants(getattr(value, field.name), str(field.type), columns)
                for path, other in below:
                    yield f".{field.name}{path}", with_field(value, field.name, other)
    elif isinstance(value, Scaled):
        yield "", Scaled(value.by + 1)
    elif not isinstance(value, Step):
        raise AssertionError(f"no variant of {value!r}")


def meaning_of(step: Step) -> Meaning:
    return output_meaning(ViewOutput(name="shown", input=step))


EVERY_STEP = {
    "name": "a step may have another name",
    "name_is_derived": "a step may have another name",
    "inputs": "each is digested with its own meaning",
    "computation": "its functions, calls and columns are fields of their own",
    "processor": "its code and its settings are fields of their own",
    "file": "digested as a whole",
    "is_former": "follows from the fields that `former` changes",
}
BOUND = "a bound: beyond it nothing is known, and that is counted"
DERIVED = "follows from what is upstream, which is digested"
PLACE = "where rows are, and which of them wait"
WHO = "who is named in reports of late rows"
NOT_PART_OF_A_MEANING = {
    "TopicStep.event_time": "compared field by field",
    "TopicStep.partitions": PLACE,
    "TopicStep.captured_by": "who fills the topic",
    **dict.fromkeys(
        [
            f"TopicStep.shed{path}"
            for path in ("", ".behind", ".keep", ".priority", ".min_priority")
        ],
        "rows that were shed under load stay so",
    ),
    "TopicStep.event_time.idle_us": "may change; what it has made late stays so",
    "TopicStep.event_time.max_ahead_us": "may change; what it has made late stays so",
    "TopicStep.event_time.delay_given": "of a stream, nothing follows from it",
    "TopicStep.event_time.flag": "the name of a column, which is part of the types",
    "AnswersStep.partitions": PLACE,
    "AnswersStep.captured_by": "nobody captures it",
    "AnswersStep.shed": "nothing sheds answers",
    "AnswersStep.requests": "follows from the topic",
    "AnswersStep.event_time.complete": "the name of a column of the topic, always the same",
    "AnswersStep.event_time.delay_given": "it has none",
    "AnswersStep.event_time.idle_us": "nothing but its caller moves the watermark",
    "AnswersStep.event_time.max_ahead_us": "nothing but its caller moves the watermark",
    "SelectStep.key[]": DERIVED,
    "SelectStep.is_table": DERIVED,
    "SelectStep.columns[order]": "columns go by their names",
    "WhereStep.key[]": DERIVED,
    "WhereStep.is_table": DERIVED,
    "WhereStep.schema": DERIVED,
    "KeyByStep.schema": DERIVED,
    "KeyByStep.is_table": DERIVED,
    "AggregateStep.aggregates[order]": "columns go by their names",
    "AggregateStep.aggregates[][].type": DERIVED,
    "AggregateStep.aggregates[][].where": "part of the columns, once the step is built",
    "AggregateStep.aggregates[][].options[][]": BOUND,
    "AggregateStep.aggregates[][].options[order]": BOUND,
    "DedupeStep.schema": DERIVED,
    "DedupeStep.key[]": DERIVED,
    "DedupeStep.is_table": DERIVED,
    "WindowStep.aggregates[][].type": DERIVED,
    "WindowStep.late.topic": "a topic, whose own meaning has it",
    "LateMoveStep.over.producer": WHO,
    "CompareStep.window.size_us": DERIVED,
    "CompareStep.window.offset_us": DERIVED,
    "CompareStep.prefix": "part of the names of columns",
    "TopStep.ties_by_length": "nothing follows from it if the key is one column",
    "JoinStep.left.schema": DERIVED,
    "JoinStep.right.schema": DERIVED,
    "JoinStep.left.key[]": DERIVED,
    "JoinStep.right.key[]": DERIVED,
    "JoinStep.left.time": DERIVED,
    "JoinStep.right.time": DERIVED,
    "JoinStep.before_us": "of joins of streams only",
    "JoinStep.after_us": "of joins of streams only",
    "JoinStep.null_matches": "part of it where the table's key may be null",
    "JoinStep.since": "of joins until a column only",
    "JoinStep.until": "of joins until a column only",
    "JoinStep.late_versions": "of joins as of a time only",
    "OverStep.columns[]": "columns, which the schema has",
    "OverStep.columns[order]": "columns go by their names",
    "OverStep.results[order]": "columns go by their names",
    "OverStep.results[][].type": DERIVED,
    "OverStep.over.producer": WHO,
    "CallStep.calls[order]": "columns go by their names",
    "ExplodeStep.errors": "it never fails",
    "OutputStep.errors": "it never fails",
    "SampleStep.errors": "it never fails",
    "ProcessStep.declaration.sides[].declared_schema": "a schema; no variant is one",
    "ProcessStep.declaration.output": "the schema, a field of its own",
    "ProcessStep.declaration.states[].declared_type": "a type; no variant is one",
    "MatchStep.over.shift_us": DERIVED,
    "MatchStep.over.producer": WHO,
    "MatchStep.patterns[][]": "the name of a single pattern",
    "MatchStep.patterns[][].define[order]": "conditions go by their symbols",
    "MatchStep.patterns[][].max_rows": BOUND,
    "MatchStep.patterns[][].max_matches": BOUND,
    "MatchStep.bits[][]": "the name of a hidden column",
    "MatchStep.timed_out": "a topic, whose own meaning has it",
    "MatchStep.when_full": BOUND,
    "RuleMatchStep.schema": "follows from the measures",
    "RuleMatchStep.over.shift_us": DERIVED,
    "RuleMatchStep.over.producer": WHO,
    "RuleMatchStep.rows": "always one row a match",
    "RuleMatchStep.several": "always several",
    "RuleMatchStep.timed_out": "a topic, whose own meaning has it",
    "RuleMatchStep.when_full": BOUND,
    "RuleMatchStep.max_rows": BOUND,
    "RuleMatchStep.max_matches": BOUND,
    "SearchStep.query_columns[][]": "names of columns, which the schema has",
    "SearchStep.query_columns[][order]": "names of columns, which the schema has",
    "SearchStep.query_columns[order]": "columns go by their names",
    "SearchStep.language.fields.filters[][]": DERIVED,
    "SearchStep.highlights": "a column, which the schema has",
    "SearchStep.explain": "a column, which the schema has",
    "SearchStep.gathered": "a column, which the schema has",
    "GatherStep.documents": DERIVED,
    "GatherStep.order[]": DERIVED,
}


def outcomes() -> dict[str, set[str]]:
    """What changing each field of each step did to its meaning: "changed", "same", or "no step" if
    there is no such step.
    """
    found: dict[str, set[str]] = {}
    for step in examples().plan().steps():
        own = step.schema.names
        given = step.inputs[0].schema.names if step.inputs else own
        names = [*(name for name in given if name in own), *(set(given) - set(own))]
        before = meaning_of(step)
        for field in fields(step):
            if field.name in EVERY_STEP:
                continue
            for path, other in variants(getattr(step, field.name), str(field.type), names):
                try:
                    same = before.is_same(meaning_of(with_field(step, field.name, other)))
                except (HeadraceError, KeyError, AttributeError, TypeError):
                    outcome = "no step"
                else:
                    outcome = "same" if same else "changed"
                name = f"{type(step).__name__}.{field.name}{path}"
                found.setdefault(name, set()).add(outcome)
    return found


def test_settings_of_steps_that_no_meaning_had_were_edited_unnoticed() -> None:
    found = outcomes()
    steps = {name.split(".")[0] for name in found}
    kinds = {step.__name__ for step in step_classes() if not step.__subclasses__()}
    assert not kinds - steps, "each kind of step has an example"
    unnoticed = {name for name, seen in found.items() if "same" in seen}
    assert unnoticed - NOT_PART_OF_A_MEANING.keys() == set()
    untried = {name for name, seen in found.items() if seen == {"no step"}}
    untried -= {name for name in untried if name.endswith("[][order]")}  # a name and its value
    assert untried - NOT_PART_OF_A_MEANING.keys() == set(), "variants make no step"
    assert NOT_PART_OF_A_MEANING.keys() - found.keys() == set(), "no such field"


def test_meanings_that_were_stored_without_further_settings_go_on() -> None:
    now = meaning_of(examples().plan().step("rules_output.match"))
    stored = {name: value for name, value in now.to_json().items() if name != "further"}
    assert now.further
    assert Meaning.from_json(stored).is_same(now)
    assert now.is_same(Meaning.from_json(stored))
    assert not now.is_same(replace(now, further="another"))
