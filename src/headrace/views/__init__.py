"""The embedded view store: all views of a pipeline in one SQLite file, `views.db`.

In the order in which data flows:

    store     the writer: declares views and commits changes, one transaction per tick
    changes   the recent changes that a store retains for subscribers
    file      the database itself: tables, opening, errors, dropping and scrubbing
    reader    snapshots for any process: get, scan, SQL, changes
    lookup    single rows as JSON, for the server
    sql       SQL: sends queries to a process of their own, which has
              query_process    its loop: loading, following, a fork for each query
              replica          the views as DuckDB tables that follow the store
              query_execution  one query, its limits and its rows
              statement        what a query may contain
    diff      the comparison of two views

How values are stored in SQLite is in `headrace.types.sqlite_codec`. Views over HTTP are in
`headrace.serve`; the pipeline steps that declare them are in `headrace.pipeline.view`.
"""
