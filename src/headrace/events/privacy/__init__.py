"""Erasing what is stored about a person.

- `vault`: personal fields are encrypted with a key a subject; deleting the key erases them.
- `excision`: removes a subject's events, and what was derived from them, from a log.
- `erasure_records`: what was erased and when, without whom; both write it.
- `scan`: searches every byte of directories for values, which proves that they are erased.
"""
