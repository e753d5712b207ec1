"""What users write: Pipeline, Stream, Table and View. Each call checks its arguments and adds a
step to the inert plan of `headrace.plan`; nothing runs until `Pipeline.run`.

    pipeline           hr.Pipeline: inputs, outputs, services; hr.shed
    relation           what streams and tables have in common: a pipeline and the last step
    stream             Stream, Table, GroupedRows, WindowedRows: the operations
    windows            checks of window(…) and compare(…)
    aggregates         checks of aggregate(…), top(…), distinct(…), union(…)
    joins              checks of join(…), as_of(…), history(…)
    patterns           hr.pattern, checks of match(…)
    search             checks of search(…)
    document_search    hr.search: a query over documents that exist already
    dataframes         df(): rows as a streaming DataFrame
    view               View: a view's rows, also in a notebook
    foreign_names      names of PySpark, pandas and others, and what to write instead
    loader             the pipeline that a file declares

Nothing here imports Spark when it is loaded, or opens a log. Running is in `headrace.runtime`.
"""
