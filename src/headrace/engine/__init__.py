"""The engine: ticks, shards and state. Hosts kernels on a stateless Spark; what is true is in the
ledger.

Read in this order: `ticks` and `cutter` (the pipeline's own time), `tasks` (reading by ticks),
`packing` and `labels` (how rows reach their shard), `shard` with `state_files` and `local_store`
(how a kernel gets its state and keeps it), `job` (one micro-batch).
"""
