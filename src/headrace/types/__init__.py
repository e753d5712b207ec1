"""Schemas, DDL, and the codecs between Python values, JSON, text and Arrow columns."""
