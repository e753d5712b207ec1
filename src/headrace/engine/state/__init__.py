"""The state of a pipeline: immutable files per step and key group (the truth), and a local store
per shard (a cache).
"""
