"""What aggregates keep for each key and how they go on: one module a family, `build.py` to choose
among them.
"""
