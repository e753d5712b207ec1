"""Processors: a user's own class over the state and timers of a key, for what no operator says.

- `processor`: what users write: `Processor`, `state`, `timer`, and what a class declares
- `context`: what a processor's methods are given: state, timers and time, as columns or by key
- `calls`: calling a processor for many keys, and finding the key or row that it fails on
- `kernel`: the kernel that keeps state and timers, tick by tick
"""
