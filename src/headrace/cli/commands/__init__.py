"""The commands, one module each, by what they work on:

    log/        topics, groups, queues, dead letters, event stores and search indexes
    pipeline/   the plan, runs, state and views of a pipeline
    edges/      what connects a log with the outside: captures, sinks, gateways, alerts

`headrace.cli.registry` lists them.
"""
