"""Recorded calls: what `stream.call(…)` does while a pipeline runs. In the order of the data:

- `call`: the declaration, and what a function gets besides its rows (`RequestContext`).
- `requests`: the rows that wait for an answer, read from their internal topic with their offsets,
  and how far event time is complete.
- `schedule`: which rows are called when: the limits, retries, the circuit breaker and the cache.
- `caller`: the loop of one call: reads requests, calls, and records answers, dead letters and
  progress in one transaction.

The steps of the plan are in `headrace.plan.answer_steps`, what starts callers in
`headrace.runtime.services`.
"""
