"""The source `postgres`: logical replication with the plugin pgoutput.

- `source`: the replication connection, chunks of snapshots, positions.
- `pgoutput`: decodes many messages of the stream at once.
- `relations`: tables as the stream describes them, and the types of their columns.
- `catalogue`: what is asked of the database, its publication and its replication slot.
"""
