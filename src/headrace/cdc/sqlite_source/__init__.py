"""SQLite as a source: triggers write every change into tables beside the user's, in the same transaction."""
