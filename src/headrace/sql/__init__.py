"""SQL as a second spelling of the plan: each statement makes the calls that users write in Python,
so that the plan of a text is the one of the Python spelling.

    script         a text: tokens, statements, places; `Span`, a range of tokens
    problems       what is wrong, where, and what to do; all errors of a text at once
    cursor         reads tokens one by one
    syntax         what a query says, as values
    query_parser   reads queries
    scope          the names that expressions can read
    calls          aggregates and functions OVER rows in expressions
    groups         GROUP BY, aggregates
    outputs        the columns of SELECT, DISTINCT, UNION
    windows        TUMBLE, HOP, SESSION, SLIDE; EMIT, LATE
    joins          JOIN … ON: equalities, bounds of time, unmatched rows
    subqueries     IN and EXISTS
    over           ROW_NUMBER() OVER (…) <= n, and functions over frames
    matches        MATCH_RECOGNIZE
    query          a query as a chain of `headrace.pipeline.stream`'s operations
    catalog        the names of a pipeline, and what SQL needs of it
    statements     CREATE TOPIC, TABLE, VIEW, STREAM; DROP; INSERT
    services       CREATE SOURCE, SINK, ALERT, FUNCTION
    descriptions   SHOW, DESCRIBE, EXPLAIN
    session        runs a text on a pipeline: `Pipeline.sql` and the loader of files come here

There is no engine here, and nothing is run: `headrace.runtime` runs the plan. SQL over views that
exist is answered by `headrace.views`.
"""
