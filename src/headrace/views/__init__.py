"""The view store: all views of a pipeline in one SQLite file, its writer, readers, look-ups and
SQL.
"""
