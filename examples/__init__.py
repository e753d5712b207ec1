"""Numbered, runnable examples, each run by the tests."""
