"""Forgetting a person: keys per subject, excision from an immutable log, and the search for what is
left.
"""
