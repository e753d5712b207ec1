"""Windows over event time: aggregates per group and window.

- `specs`: the kinds of windows, `hr.tumbling(...)` and its siblings.
- `late_policy`: what becomes of late rows, `hr.late`.
- `factory`: chooses the kernel for a window step.
- `kernel`: what all window kernels share: settings, watermarks, emission of results.
- `late_rows`: counts and collects late rows: those behind the step's horizon.
- `assignment`: which tumbling or hopping windows a row is in, also in time zones.
- `fixed_window`: the kernel of tumbling and hopping windows.
- `session_window`: the kernel of sessions, for aggregates whose states can be merged.
- `sliding_window`: the kernel of sliding windows, for aggregates whose states can be merged.
- `pane_store`: the state of sliding windows.
- `buffered_window`: sessions and sliding windows computed from buffered rows, for the rest.
- `comparison`: each window next to the one a period earlier (`compare`).
- `state`: how windows, timers and buffered rows are laid out in the state.

The aggregates themselves are in `operators/aggregates`; the steps of a plan that build these
kernels in `plan/window_steps.py`.
"""
