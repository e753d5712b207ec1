"""The engine: ticks, shards and state. It hosts the kernels of `operators` on a Spark that keeps no
state of its own.

In the order in which a batch flows:

- `ticks`: the pipeline's logical time; the journal of ticks, cutting new ones, control records
- `context`: what the tasks of a batch need to know
- `reader`: the offset ranges to read for some ticks
- `event_times`: event times of rows where they are read, and how far each may move time
- `watermarks`: how far event time has come
- `job_graph`: what a batch computes, as nodes that can be run in several ways
- `map_tasks`: the functions before the shuffle: reading, row-local steps, packing, filtering
- `shuffle`: how rows reach their shards; `shuffle_items`: in which form Spark moves them
- `shard`: the kernels of a stage with their state, behind the shuffle
- `state`: state files, the local store, folding, sweeping
- `whole_job`: all of that in one task, for small batches
- `worker_daemon`: from which Spark forks its Python workers
- `outputs`: the tasks that write derived topics and views
- `dead_letters`: rows that a step cannot use
- `reports`: how tasks pass their results to the driver
- `commit`: the commit protocol
- `ledger`: what has been committed, and by which runner

`runtime` builds jobs from the plan and runs them; `operators` has the kernels; `plan` the steps.
"""
