"""The source of `hr.cdc.mariadb` and `hr.cdc.mysql`: the row binlog.

- `source`: puts transactions together from the binlog's events; XA; what must be read again.
- `binlog`: reads the binlog in a thread.
- `row_buffer`: rows become changes, in the order in which they were made.
- `row_event`: the events that rows are in, and their values.
- `statement`: what a statement in the binlog does to tables.
- `chunk`: chunks of snapshots, and where they belong into the stream.
- `column_type`: the types of columns; values of both sides in one form, and as Arrow arrays.
- `catalogue`: what is asked of the server: settings, tables, foreign keys, GTIDs.
"""
