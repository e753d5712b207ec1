"""Views over HTTP: rows, SQL, and changes as they happen. `server.start` runs a server in a thread.

In the order in which a request passes:

    server            the server's thread and port
    redaction         values of deleted people hidden in responses
    app               the routes and their handlers
    requests          limits, parameters, rows as JSON
    stores            the store, and version, from which a view is served
    lookups           single rows by key, the fast path
    views             rows of a range, and SQL
    time_travel       rows as of an earlier tick
    read_your_writes  waiting until a view contains some offsets
    subscriptions     the changes of a view and the rows of a topic, as events
    selections        the rows that subscribers select, evaluated once for all
    channels          the delivery of events to many subscribers (server-sent events)
    ask               questions to a pipeline, and their answers
    dashboard         what the dashboard and `headrace top` show
    metrics           Prometheus metrics
    openapi           the description of all this

What it shares with HTTP gateways (access control, errors as statuses) is in `headrace.http`, the
stores themselves in `headrace.views`, the status of a run in `headrace.run_status`, and HTTP
ingestion in `headrace.gateways`.
"""
