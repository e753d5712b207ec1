"""Questions to the stream: `shop.ask("reach", using=reach)`. A question is a row of a topic, meets a table as of its tick, and the answer is a row of another topic.

So questions and answers are in the log, a replay answers them again in the same way, and whoever can append can ask; `POST /ask/reach` (`serve/asks`) appends, and waits for the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.errors import PlanError, StreamOnly
from headrace.log.asks import ASK_ID, FOUND, answers_topic, questions_topic
from headrace.log.names import check_name
from headrace.log.schema import parse_schema, to_ddl

if TYPE_CHECKING:
    from headrace.pipeline.pipeline import Pipeline
    from headrace.pipeline.stream import Stream, Table

def asked(pipeline: Pipeline, name: str, using: Any, question: str | None, keep: str) -> Stream:
    """What `Pipeline.ask` makes: the topic of questions, the join, the topic of answers."""
    check_name(name, what="name of a question", error=PlanError)
    table = _checked(pipeline, name, using)
    about = pa.schema([table.schema.field(column) for column in table.key])
    more = pa.schema([]) if question is None else parse_schema(question)
    for column in more.names:
        if column in table.schema.names or column in {ASK_ID, FOUND}:
            raise PlanError(f"The question {name!r} has a column {column!r}, which the table or the answer has too.", fix="rename it.")
    schema = pa.schema([pa.field(ASK_ID, pa.string()), *about, *more])
    questions = pipeline.topic(questions_topic(name), schema=to_ddl(schema), key=ASK_ID, retention=keep)
    known = table.with_columns(**{FOUND: "true"})
    answers: Stream = questions.join(known, on=list(table.key), how="left", name=f"ask.{name}.join")
    answers = answers.key_by(ASK_ID)
    pipeline.write(answers_topic(name), answers, retention=keep)
    return answers


def _checked(pipeline: Pipeline, name: str, using: Any) -> Table:
    from headrace.pipeline.stream import Stream, Table

    if isinstance(using, Stream):
        raise StreamOnly(f"The question {name!r} is to use the stream {using.step.place}: it has no rows that a question could meet.", fix="use a table: to_table(key), or group_by(…).aggregate(…).")
    if not isinstance(using, Table):
        raise PlanError(f"The question {name!r} is to use a {type(using).__name__}.", fix="give it a table of this pipeline.")
    if using.pipeline is not pipeline:
        raise PlanError(f"The question {name!r} is to use a table of another pipeline.", fix="write it to a topic, and read that topic here.")
    for column in (ASK_ID, FOUND):
        if column in using.schema.names:
            raise PlanError(f"The question {name!r} uses a table with a column {column!r}, which answers have.", fix="rename it.")
    return using
