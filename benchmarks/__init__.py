"""Benchmarks: one file a benchmark, each against its peer. `make bench [ONLY=name]` runs them."""
