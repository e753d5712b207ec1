"""The people and devices of `headrace demo`, and a second computation of everything the shop's
pipeline emits. The pipeline itself is one file: examples/shop.py.
"""
