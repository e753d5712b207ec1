"""The source `postgres`: logical replication with the plugin pgoutput.

- `source`: the replication connection, and where chunks and stopped tables belong in the stream.
- `chunks`: reads chunks of snapshots.
- `position`: what a position is, and of which server.
- `pgoutput`: decodes many messages of the stream at once.
- `deferred_keys`: tables in which two rows may have one key for a moment.
- `relations`: tables as the stream describes them, and the types of their columns.
- `catalogue`: what is asked of the database, its publication and its replication slot.
"""
