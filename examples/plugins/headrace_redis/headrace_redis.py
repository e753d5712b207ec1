"""A source of rows that Headrace does not have: a stream of Redis.

After `pip install ./examples/plugins/headrace_redis`, the command line knows its URLs:

    headrace capture redis-stream://localhost/orders --topic orders --log file:data

Each entry is a row: its fields are the columns, as text, and the topic's types decide what they
are. An entry has an id, which is the source's position; so each is stored once, through any crash.
Entries are not removed: let `XADD … MAXLEN` or `XTRIM` do that, later than the source reads.
"""

from typing import Any
from urllib.parse import urlsplit

import redis
from redis import exceptions

from headrace.errors import ConfigurationError, RetryError
from headrace.secrets import secret
from headrace.sources import RowSource, Source, SourceRows
from headrace.types.text import TextRow

BEGINNING, MAX_ROWS = "0-0", 5_000


def source(url: str, *, topic: str, name: str | None = None, **settings: Any) -> Source:
    """Declare the source of `redis-stream://user@host/KEY`; `password` is env:NAME or file:PATH."""
    parts = urlsplit(url)
    key = parts.path.removeprefix("/")
    if not key:
        raise ConfigurationError(f"{url} names no stream.", fix="write redis-stream://HOST/KEY.")
    options = {"url": url, "key": key, "password": settings.pop("password", "")}
    given = {"kind": "redis-stream", "name": name or f"redis.{key}", "topic": topic, **settings}
    return Source(reader=RedisStream, options=options, **given)


class RedisStream(RowSource):
    def start(self, position: str | None) -> None:
        self._key: str = self.source.options["key"]
        parts = urlsplit(self.source.options["url"])
        self._redis: Any = redis.Redis(
            host=parts.hostname or "localhost",
            port=parts.port or 6379,
            username=parts.username,
            password=secret("password", self.source.options["password"]) or None,
            decode_responses=True,
        )
        self._position = position or BEGINNING
        self._check_nothing_missed()

    def _check_nothing_missed(self) -> None:
        """Refuse to go on behind entries that were removed before they were read."""
        try:
            if not self._redis.exists(self._key):
                return
            removed_to = self._redis.xinfo_stream(self._key).get("max-deleted-entry-id", BEGINNING)
        except exceptions.ConnectionError as error:
            raise RetryError(f"Redis cannot be reached: {error}.") from error
        except exceptions.ResponseError as error:
            raise ConfigurationError(f"Redis: {error}.", fix="check key and user.") from error
        if self._position != BEGINNING and _order(removed_to) > _order(self._position):
            raise ConfigurationError(
                f"Entries of {self._key} up to {removed_to} were removed, and may not all have been"
                f" read: the source is at {self._position}.",
                fix="let XTRIM keep more; --start-over reads all that is there, again.",
            )

    def read(self, timeout_s: float) -> SourceRows | None:
        wait_ms = max(1, int(timeout_s * 1000))
        try:
            found = self._redis.xread({self._key: self._position}, count=MAX_ROWS, block=wait_ms)
        except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
            raise RetryError(f"Redis cannot be reached: {error}.") from error
        if not found:
            return None
        entries = next(iter(found.values())) if isinstance(found, dict) else found[0][1]
        self._position = entries[-1][0]
        lacking = dict.fromkeys(self.topic.columns)
        rows = [TextRow(number, {**lacking, **row}) for number, (_, row) in enumerate(entries)]
        return SourceRows(rows, position=self._position, where=self._key)

    def close(self) -> None:
        if hasattr(self, "_redis"):
            self._redis.close()


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-"))
