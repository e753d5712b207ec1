"""The inert plan of a pipeline. `headrace.pipeline` builds it, `headrace.runtime` turns it into
Spark jobs; nothing here runs or opens a log.

    event_time      hr.EventTime, hr.device_time, hr.processing_time
    columns         checks of columns, keys and conditions
    plan            the plan, its base class of steps, row-local steps, aggregation, outputs
    window_steps    windows
    join_steps      joins, rankings, distinct rows, versions
    match_steps     patterns
    search_steps    search
    names           stable names of steps
    meanings        what an output means: whether an edit leaves its rows as they are
    fingerprints    whether a step's state may be continued after an edit
    rendering       Mermaid, SVG, plan.json

What users call is in `headrace.pipeline`; expressions are in `headrace.expressions`, the kernels of
the steps in `headrace.operators`.
"""
