"""Joins of streams and tables.

Shared, from the bottom up:

- `row_store`: rows by key in the state, sorted within a key, in headers and chunks; `latest_rows`
  and `top_rows` use it too.
- `timers`: state entries by time, which say when a key is to be visited.
- `sides`: the inputs of a join and the columns of its result; `SettleKernel`.
- `timeline`: the versions of a table by the time from which they are valid; `HistoryKernel`.

Joins:

- `stream_stream`: two streams within a time bound.
- `stream_table`: a stream with a table as it is now.
- `versioned_join`: a stream with a table as it was at the row's time; waiting, or correcting.
- `table_table`: two tables into a table.

The steps that build these kernels are in `plan/join_steps.py`; what users write is in
`pipeline/joins.py`.
"""
