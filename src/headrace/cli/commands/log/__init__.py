"""Commands on a log: topics, rows, groups, queues, dead letters, event stores, search indexes."""
