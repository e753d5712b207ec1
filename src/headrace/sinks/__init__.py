"""Exactly-once outputs, and the ledger that decides what happened."""
