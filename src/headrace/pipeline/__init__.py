"""From a declared pipeline to a running one: Pipeline, Stream and Table build an inert plan, the
planner cuts it into jobs, the runner runs them.

Nothing in the declaring half (pipeline, stream, plan, expressions, names, draw, load) imports Spark
or opens a log.
"""
