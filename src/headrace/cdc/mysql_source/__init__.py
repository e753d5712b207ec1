"""The source of `hr.cdc.mariadb` and `hr.cdc.mysql`: the row binlog.

- `source`: puts transactions together from the binlog's events; chunks of snapshots; positions.
- `binlog`: reads the binlog in a thread.
- `catalogue`: what is asked of the server: settings, tables, types, GTIDs; rows as Arrow batches.
"""
