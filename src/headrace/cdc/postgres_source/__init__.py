"""Postgres as a source: logical replication with `pgoutput`, and snapshots in chunks by COPY. It
needs Postgres 14 or newer and the extra `postgres`.
"""
