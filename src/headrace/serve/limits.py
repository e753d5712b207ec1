"""The bounds of what a server does for others: waiting, sending, keeping. Each has a value that fits a laptop and a small machine alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Tests and `bench_serve.py` choose others; users have these."""

    poll_s: float = 0.05
    """How often a view store or topic that someone follows is looked at."""
    heartbeat_s: float = 15.0
    subscribers: int = 10_000
    slow_s: float = 30.0
    """A subscriber that does not take one event in this time is dropped."""
    ring_events: int = 1_024
    """So many ticks are at hand for those who follow; one that falls behind them is dropped, and can resume from what the store keeps."""
    ring_bytes: int = 16 << 20
    resuming: int = 8
    """So many subscribers at once are sent what they missed; others wait."""
    resuming_s: float = 120.0
    """One that needs longer for it makes room for others, and resumes where it is."""
    rows: int = 1_000
    """A page of rows, unless another size is asked for."""
    most_rows: int = 100_000
    sql_s: float = 10.0
    most_sql_s: float = 60.0
    body_bytes: int = 1 << 20
    reads: int = 4
    """Threads that scan and query."""
    waiting_reads: int = 64
    """Reads that wait for one of them; more are told to come back."""
    wait_s: float = 10.0
    """How long `at_least` waits, unless told."""
    most_wait_s: float = 60.0
    undone_rows: int = 1_000_000
    """A view with more rows is not brought back to an earlier tick as a whole, only key by key."""
