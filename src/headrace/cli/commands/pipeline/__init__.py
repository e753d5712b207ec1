"""Commands on a pipeline: its plan, runs, status, state, views and dashboard."""
