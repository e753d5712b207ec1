"""Tables of Parquet files, in a directory or in an object store.

- `file_store`: what a place for files must be able to do, and the local directory.
- `object_store`: S3, Google Cloud Storage and Azure, by the package `obstore`.
- `object_store_access`: credentials, and errors that say which are missing; also for Delta.
- `manifest`: which files form a table, with the sink's checkpoint. A new manifest is a commit.
- `partition_folders`: rows by the folders that their values name, such as `dt=2026-03-01`.
- `parquet_target`: the sink's target.
"""
