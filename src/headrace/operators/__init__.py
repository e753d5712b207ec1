"""Operators: the kernels that compute, and the specifications that a plan holds of them.

Nothing here knows Spark or the log: a kernel turns Arrow tables and keyed state into Arrow tables.
The engine (`engine/shard.py`) and `headrace.testing` host kernels; `plan` builds them from steps.

- `kernel`: the contract of a kernel, its state and its watermarks. Read it first.
- `watermark_spec`: how an input's watermark advances, as a plan holds it (`engine/watermarks.py`
  does it).
- `load_shedding`: which rows of an input are dropped when a pipeline is far behind.
- `device_time`: event times of devices with wrong clocks, corrected.
- `deduplication`: the first row of each key within a time.
- `aggregates/`: aggregates per group, and `hr.agg`.
- `windows/`: aggregates per group and window, `hr.late`, and window comparison.
- `latest_rows`: the latest row of each key, by arrival or by event time.
- `hold`: the rows of a table that have been there for a while (`for_` of alerts).
- `top_rows`: the first rows of each group, and the distinct rows.
- `joins/`: streams and tables, joined.
- `patterns/`: sequences of rows (`match`).
- `search/`: stored queries over documents.
- `changelog`: tables as sequences of changes; every kernel with a table as output builds them.
"""
