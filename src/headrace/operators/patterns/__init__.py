"""Patterns: what is said about sequences of rows, and the kernel that finds them. `parsing` reads
them, `automaton` says what may follow what, `matching` finds.
"""
