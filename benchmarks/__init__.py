"""Benchmarks: one file a benchmark, each beside its peer. `make bench [ONLY=name]` runs them."""
