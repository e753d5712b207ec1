"""Views by Postgres's protocol, for every client that speaks it: psql, drivers, BI tools.

In the order in which a statement passes:

    listener      the socket, and its connections
    connection    the messages of one connection, in order
    messages      how they are cut out of bytes, and written
    roles         who may connect, passwords (SCRAM), and which views a role sees
    lexer         the words of a statement
    key_lookup    the row of one key, without an engine
    session       what each statement does: queries, cursors, subscriptions, settings
    parameters    the types of parameters that a client leaves open
    catalogue     `pg_catalog` and `information_schema`, for clients that ask what there is
    settings      SET and SHOW
    subscription  SUBSCRIBE TO view
    values        Arrow columns as rows of the protocol, and parameters back
    errors        codes of errors (SQLSTATE)

Queries run where those over HTTP run (`headrace.views.sql`), with the same limits.

There is no library for the server's side of the protocol that fits: those on PyPI (riffq,
buenavista) bring an engine, a runtime or a thread per connection of their own, and have neither
cursors over changes nor cancellation.
"""
