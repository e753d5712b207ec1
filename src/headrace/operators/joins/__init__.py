"""Joins of streams and tables, and what else a table can be made into: kernels that keep rows of
many keys in order.
"""
