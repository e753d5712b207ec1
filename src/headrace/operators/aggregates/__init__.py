"""Aggregates per group, and the accumulators that compute them.

- `functions`: `hr.agg`, what users write; `specs`: an aggregate as a plan holds it.
- `kernel`: the kernel of `group_by(...).aggregate(...)`; `partial_aggregation`: combining rows
  before the shuffle.
- `aggregation`: all aggregates of a step over the same groups, and the layout of their state. The
  window kernels (`operators/windows`) build on it too.
- `state_pool`: states that are merged with each other, for sessions and sliding windows.
- `accumulator`: what an accumulator is; `factory`: chooses one for an aggregate.
- `sums`: counts, sums and averages of integers, decimals and intervals; decayed sums.
- `float_sums`: sums, averages and standard deviations of floating-point numbers.
- `append_only`: `min`, `max`, `first`, `last` and `collect` over streams.
- `retractable`: the same aggregates over tables, and `count_distinct`.
- `sketches`: approximate aggregates, from Apache DataSketches.
- `custom`: users' own aggregates.
"""
