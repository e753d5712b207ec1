"""Threads for what takes time: scans and queries. Few of them, and few that wait for one; who comes then is told to come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from headrace.serve.answers import Refused
from headrace.serve.limits import Limits

P = ParamSpec("P")
T = TypeVar("T")


class Reads:
    """Used by the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._threads = ThreadPoolExecutor(limits.reads, thread_name_prefix="headrace-read")
        self._most, self._under_way = limits.reads + limits.waiting_reads, 0

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        if self._under_way >= self._most:
            raise Refused(503, f"{self._most} reads are under way or wait, which is the most.", fix="come back in a moment.")
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*arguments, **named))
        finally:
            self._under_way -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
