"""The targets `elasticsearch` and `opensearch`: an index, one document a row, by the bulk API that
both servers have.

A bulk request is no transaction. What makes a row arrive exactly once all the same is versions:
every write of a session carries a version that is greater than those of all sessions before it
(`version_type=external_gte`), so that a request that was sent long ago, or by a process that was
superseded, never replaces what came after it:

    version  =  generation of the session (26 bits)  |  number of the batch in it (37 bits)

    {"index": {"_id": "7", "version": 3917013215897387009, "version_type": "external_gte"}}
    {"id": 7, "name": "ada"}
    {"delete": {"_id": "8", "version": 3917013215897387009, "version_type": "external_gte"}}

The checkpoint is a document of the index `headrace-sinks`, replaced only by whoever has seen the
newest (`if_seq_no`), after all requests of a batch have succeeded. After a crash in between, the
batch is applied again, and gives the same documents: between two checkpoints readers can see a part
of a batch. The checkpoint names the index by its UUID. If the index was deleted and made again, or
restored from a snapshot, the UUID is another one, and the sink does not go on as if nothing had
happened.

A document's id is the row's key: a text as it is, other values as JSON, several columns as a JSON
array; an empty text, and one that begins with `[`, as an array of one. Types of fields:

    Spark                            Elasticsearch and OpenSearch
    BOOLEAN                          boolean
    TINYINT, SMALLINT, INT, BIGINT   byte, short, integer, long
    FLOAT, DOUBLE                    float, double; NaN and infinities are refused
    DECIMAL(p, s)                    double for queries; the document has all digits, as text
    STRING                           text, and keyword as NAME.keyword
    BINARY                           binary (base64)
    DATE, TIMESTAMP, TIMESTAMP_NTZ   date; the document has microseconds
    TIME                             keyword
    INTERVAL                         long, microseconds
    ARRAY, STRUCT                    of the type of its elements; an object with the same fields
    MAP, VARIANT                     stored, not indexed
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import ConfigurationError, SinkFenced, TargetMismatch, TargetUnavailable
from headrace.retry import retry_after_s
from headrace.secrets import secret
from headrace.sinks.base import (
    Refusal,
    RowsRefused,
    SinkSpec,
    Target,
    bisect_refused,
    check_refused,
    convert_readable,
    refusals,
    refuse_unreadable,
    rows_to_json,
    shorten,
)
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.types.ddl import VARIANT_TYPE
from headrace.types.json_codec import array_text, decode_rows, json_text

CHECKPOINT_INDEX = "headrace-sinks"
MAX_BULK_BYTES = 8 << 20
MAX_BULK_ROWS = 5_000
MAX_ID_BYTES = 512
MAX_CAUSES = 3
TIMEOUT_S = 60.0
SCROLL = "10m"
PAGE_ROWS = 2_000
SNAPSHOT_ATTEMPTS = 5
MIN_MAJOR = {"elasticsearch": 7, "opensearch": 1}
_BATCH_BITS = 37
_IGNORE_ABOVE = 8191
"""Characters of a text that can be found as a keyword: Lucene's longest term has 32,766 bytes."""
_DELETED_FOR = "1h"
"""How long the server remembers the version of a document that was deleted."""

_TEMPORARY = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
_BLOCKED, _NO_INDEX, _EXISTS = (
    "cluster_block_exception",
    "index_not_found_exception",
    "resource_already_exists_exception",
)
_FIELD_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
}


# Requests


@dataclass(frozen=True)
class SearchResponse:
    """A response of the server: its status, and its JSON."""

    status: int
    body: Any

    @property
    def is_success(self) -> bool:
        return self.status < HTTPStatus.BAD_REQUEST

    @property
    def error_type(self) -> str:
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("type", "")) if isinstance(error, dict) else ""

    @property
    def reason(self) -> str:
        """What the server says is wrong, in one line."""
        error = self.body.get("error") if isinstance(self.body, dict) else self.body
        return shorten(_reason(error) or f"HTTP {self.status}")


def _reason(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error or "")
    causes: list[str] = []
    cause: Any = error
    while isinstance(cause, dict) and len(causes) < MAX_CAUSES:
        if (text := str(cause.get("reason", ""))) and text not in causes:
            causes.append(text)
        cause = cause.get("caused_by")
    return f"{error.get('type', 'error')}: {'; '.join(causes)}"


class SearchServer:
    """One connection to a server of Elasticsearch or OpenSearch."""

    def __init__(self, url: str, headers: Mapping[str, str], ca: str | None) -> None:
        parts = urlsplit(secret("url", url))
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigurationError(
                f"{_without_password(url)} is not the address of a server.",
                fix="write it as https://HOST:9200, or say where it is stored: env:NAME.",
            )
        self.name = f"{parts.scheme}://{parts.hostname}:{parts.port or _default_port(parts.scheme)}"
        self._path = parts.path.rstrip("/")
        self._headers = {name: secret(name, value) for name, value in headers.items()}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            encoded = base64.b64encode(pair.encode()).decode()
            self._headers.setdefault("Authorization", f"Basic {encoded}")
        port = parts.port or _default_port(parts.scheme)
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigurationError(
                    f"The certificates of {ca!r} cannot be read: {error}.",
                    fix="give a file in PEM format with ca=….",
                ) from error
            self._connection = http.client.HTTPSConnection(
                parts.hostname, port, timeout=TIMEOUT_S, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, port, timeout=TIMEOUT_S)

    def close(self) -> None:
        self._connection.close()

    def request(
        self, method: str, path: str, body: Any = None, *, lines: bytes | None = None
    ) -> SearchResponse:
        """Send a request, and return the response: a success, or an error that the caller judges.

        Args:
            method: Of HTTP.
            path: With its query.
            body: Sent as JSON.
            lines: Sent as they are, instead of `body`.

        Raises:
            TargetUnavailable: The server is away or busy, or it is not known what it did.
            ConfigurationError: It refuses the credentials, its certificate is not trusted, or it is
                no such server.
        """
        data, headers = lines, dict(self._headers)
        if body is not None:
            data = json.dumps(body).encode()
        if data is not None:
            kind = "application/json" if lines is None else "application/x-ndjson"
            headers["Content-Type"] = kind
        try:
            self._connection.request(method, f"{self._path}{path}", data, headers)
            response = self._connection.getresponse()
            content = response.read()
        except ssl.SSLCertVerificationError as error:
            self._connection.close()
            raise ConfigurationError(
                f"The certificate of {self.name} is not trusted: {error.verify_message}.",
                fix="give the authority that signed it, with ca='PATH'.",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise TargetUnavailable(
                f"{self.name} does not answer: {str(error) or type(error).__name__}.",
                fix="see that the server runs and can be reached.",
            ) from error
        return self._judged(response, content)

    def _judged(self, response: http.client.HTTPResponse, content: bytes) -> SearchResponse:
        try:
            parsed = json.loads(content or b"{}")
        except ValueError:
            parsed = content[:1000].decode(errors="replace")
        judged = SearchResponse(response.status, parsed)
        if response.status in _TEMPORARY or judged.error_type in {_BLOCKED, _NO_INDEX}:
            raise TargetUnavailable(
                f"{self.name}: {judged.reason}",
                fix="see what the server's log says, and whether its disk is full.",
                wait_s=retry_after_s(response.headers.get("Retry-After")) or 0.0,
            )
        if response.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            raise ConfigurationError(
                f"{self.name} refuses the credentials: {judged.reason}",
                fix=(
                    "give user and password in the URL, or headers={'Authorization': 'env:NAME'}."
                    " The sink needs the privileges to create, read and write its index and"
                    f" {CHECKPOINT_INDEX!r}."
                ),
            )
        if judged.is_success and not isinstance(parsed, dict):
            raise ConfigurationError(
                f"{self.name} does not answer as Elasticsearch and OpenSearch do.",
                fix="check the address.",
            )
        return judged


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 9200


def _without_password(url: str) -> str:
    return f"…@{url.rpartition('@')[2]}" if "@" in url else repr(url)


# The target


class ElasticsearchTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        super().__init__(sink, shape)
        self._server = SearchServer(
            sink.options["url"], sink.options["headers"], sink.options["ca"]
        )
        self._index = quote(self.table, safe="")
        self._document: dict[str, Any] | None = None
        """The document of the checkpoint, with its `_seq_no`, as it was when the commit began."""
        self._uuid = ""
        self._next: dict[str, Any] | None = None
        self._generation = 0
        self._batches = 0
        self._starts_over = False
        self._beginning_owner: int | None = None

    def close(self) -> None:
        self._server.close()

    # Preparing

    def prepare(self) -> None:
        """Check the server, and create the index, its fields and the index of checkpoints, as far
        as they are missing.
        """
        self._check_server()
        if self.table != self.table.lower():
            raise TargetMismatch(
                f"An index cannot be called {self.table!r}: names of indices are in lower case.",
                fix=f"choose another name, with table={self.table.lower()!r} (--table …).",
            )
        wanted = {field.name: _field_mapping(field.type) for field in self.shape.schema}
        if self._server.request("HEAD", f"/{self._index}").status == HTTPStatus.NOT_FOUND:
            self._create(wanted)
        self._check_index(wanted)
        self._create_index(
            CHECKPOINT_INDEX,
            {"number_of_shards": 1, "auto_expand_replicas": "0-1", "hidden": True},
            {"dynamic": False},
        )

    def _check_server(self) -> None:
        response = self._server.request("GET", "/")
        version = response.body.get("version") if isinstance(response.body, dict) else None
        if not response.is_success or not isinstance(version, dict) or "number" not in version:
            raise ConfigurationError(
                f"{self._server.name} does not answer as Elasticsearch and OpenSearch do.",
                fix="check the address.",
            )
        kind = str(version.get("distribution", "elasticsearch"))
        major = int(str(version["number"]).partition(".")[0])
        if major < MIN_MAJOR.get(kind, 1):
            raise TargetMismatch(
                f"{self._server.name} is {kind} {version['number']}, which is too old.",
                fix=f"use {kind} {MIN_MAJOR[kind]} or later.",
            )

    def _create(self, wanted: Mapping[str, Any]) -> None:
        if not self.sink.create:
            raise TargetMismatch(
                f"There is no index {self.table!r}.",
                fix="create it; or leave out create=False (--no-create), so that the sink does.",
            )
        mappings = {"dynamic": False, "properties": wanted}
        self._create_index(self.table, {"gc_deletes": _DELETED_FOR}, mappings)

    def _create_index(self, name: str, settings: Any, mappings: Any) -> None:
        path = f"/{quote(name, safe='')}"
        if self._server.request("HEAD", path).is_success:
            return
        response = self._server.request(
            "PUT", path, {"settings": {"index": settings}, "mappings": mappings}
        )
        if not response.is_success and response.error_type != _EXISTS:
            raise TargetMismatch(
                f"The index {name!r} cannot be created: {response.reason}",
                fix="choose another name with table=… (--table …), or mend what it says.",
            )

    def _check_index(self, wanted: Mapping[str, Any]) -> None:
        response = self._server.request("GET", f"/{self._index}?flat_settings=true")
        concrete = response.body if response.is_success else {}
        if len(concrete) != 1 or next(iter(concrete), "").startswith(".ds-"):
            raise TargetMismatch(
                f"{self.table!r} is not one index: it is"
                f" {', '.join(sorted(concrete)) or response.reason}.",
                fix=(
                    "choose an index, or an alias of one, with table=… (--table …). In a data"
                    " stream nothing can be replaced."
                ),
            )
        (described,) = concrete.values()
        settings, mappings = described["settings"], described["mappings"]
        if settings.get("index.translog.durability") == "async":
            raise TargetMismatch(
                f"The index {self.table!r} acknowledges writes before they are on its disk, and"
                " could lose some of which the checkpoint says that they are there.",
                fix=(
                    f'PUT /{self.table}/_settings with {{"index.translog.durability": "request"}}.'
                ),
            )
        if mappings.get("_source", {}).get("enabled") is False:
            raise TargetMismatch(
                f"The index {self.table!r} does not store documents (_source), so that they cannot"
                " be compared, nor be completed when a change left columns unchanged.",
                fix="let the sink create an index, with table=… (--table …).",
            )
        missing = {
            name: mapping
            for name, mapping in wanted.items()
            if name not in mappings.get("properties", {})
        }
        if missing and self.sink.create:
            response = self._server.request(
                "PUT", f"/{self._index}/_mapping", {"properties": missing}
            )
            if not response.is_success:
                raise TargetMismatch(
                    f"The index {self.table!r} does not take the fields {', '.join(missing)}:"
                    f" {response.reason}",
                    fix="choose another index with table=… (--table …), or mend what it says.",
                )

    # A commit

    def begin(
        self, owner: int, *, resume: bool = False, start_over: bool = False
    ) -> SinkCheckpoint:
        document = self._checkpoint_document()
        source = {} if document is None else document["_source"]
        if source.get("cleared_by") is not None:  # somebody began to start over, and did not end
            if resume and source["cleared_by"] != owner:
                raise SinkFenced(
                    "Another process writes to this index.",
                    fix="nothing, if that was intended: it goes on where this process stopped.",
                )
            resume, start_over = False, True
        self._beginning_owner, self._starts_over = owner, start_over and not resume
        try:
            return super().begin(owner, resume=resume, start_over=start_over)
        finally:
            self._beginning_owner, self._starts_over = None, False

    @contextmanager
    def atomic(self) -> Iterator[None]:
        self._look()
        if self._beginning_owner is not None:
            # The clock counts only where the generations before are not known any more.
            known = 0 if self._document is None else self._document["_source"]["generation"]
            self._generation, self._batches = max(known + 1, int(time.time()) // 60), 0
        yield
        if self._next is not None:
            self._store(self._next)

    def _look(self) -> None:
        """See which checkpoint and which index are there."""
        self._document, self._uuid = self._checkpoint_document(), self._index_uuid()
        self._next = None

    def _checkpoint_document(self) -> dict[str, Any] | None:
        response = self._server.request("GET", f"/{CHECKPOINT_INDEX}/_doc/{self._index}")
        if response.status == HTTPStatus.NOT_FOUND:
            return None
        document: dict[str, Any] = response.body
        return document

    def _index_uuid(self) -> str:
        response = self._server.request(
            "GET", f"/{self._index}/_settings/index.uuid?flat_settings=true"
        )
        if not response.is_success or len(response.body) != 1:
            raise TargetUnavailable(f"The index {self.table!r} is not there: {response.reason}")
        (described,) = response.body.values()
        return str(described["settings"]["index.uuid"])

    def read_checkpoint(self) -> SinkCheckpoint | None:
        source = {} if self._document is None else self._document["_source"]
        text = source.get("checkpoint")
        if self._starts_over:
            return None if text is None else SinkCheckpoint.from_json(text)
        if source.get("cleared_by") is not None:
            raise TargetUnavailable(
                f"The index {self.table!r} is being emptied by another process.",
                fix="nothing: it is looked at again.",
            )
        if source.get("index_uuid") == self._uuid:
            return None if text is None else SinkCheckpoint.from_json(text)
        if self._beginning_owner is None and text is not None:
            raise TargetUnavailable(
                f"The index {self.table!r} was made again while the sink ran.",
                fix="nothing: it is looked at again.",
            )
        if self._count():
            was = "no checkpoint says which rows of the topic they are of"
            if text is not None:
                was = "it is not the index that this sink filled: it was made again or restored"
            raise TargetMismatch(
                f"The index {self.table!r} has documents, and {was}.",
                fix=(
                    "choose another index with table=… (--table …). --start-over removes these"
                    " documents, and fills the index from the topic's beginning."
                ),
            )
        return None

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._next = {
            "checkpoint": checkpoint.to_json(),
            "index_uuid": self._uuid,
            "generation": self._generation,
        }

    def _store(self, source: dict[str, Any]) -> None:
        condition = "op_type=create"
        if self._document is not None:
            condition = (
                f"if_seq_no={self._document['_seq_no']}"
                f"&if_primary_term={self._document['_primary_term']}"
            )
        response = self._server.request(
            "PUT", f"/{CHECKPOINT_INDEX}/_doc/{self._index}?{condition}", source
        )
        if response.status == HTTPStatus.CONFLICT:
            raise TargetUnavailable(
                f"The checkpoint of the index {self.table!r} was changed meanwhile.",
                fix="nothing: it is read again.",
            )
        if not response.is_success:
            raise TargetMismatch(
                f"The checkpoint cannot be stored in {CHECKPOINT_INDEX!r}: {response.reason}",
                fix="mend what it says.",
            )
        self._document = {
            "_seq_no": response.body["_seq_no"],
            "_primary_term": response.body["_primary_term"],
            "_source": source,
        }

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        self._batches += 1
        refused: list[Refusal] = []
        for rows, offsets, is_delete in (
            (batch.deletes, batch.delete_offsets, True),
            (batch.upserts, batch.upsert_offsets, False),
        ):
            for start in range(0, rows.num_rows, MAX_BULK_ROWS):
                self._write(
                    rows.slice(start, MAX_BULK_ROWS),
                    offsets.slice(start, MAX_BULK_ROWS),
                    is_delete,
                    refused,
                )
        return refused

    def _write(
        self, rows: pa.Table, offsets: pa.Table, is_delete: bool, refused: list[Refusal]
    ) -> None:
        """Write some rows, in requests of at most `MAX_BULK_BYTES`."""
        # The rows of a request that fails as a whole are sent in halves. Each row has its number,
        # by which refusals of single rows find their offsets.
        numbers = pa.array(range(rows.num_rows), pa.int64())

        def attempt(part: pa.Table) -> None:
            own = part["__number"].to_pylist()
            reasons = self._bulk(part.drop_columns(["__number"]), is_delete)
            for index, reason in reasons.items():
                refused.extend(refusals(offsets.slice(own[index], 1), reason))
            check_refused(refused)

        bisect_refused(rows.append_column("__number", numbers), offsets, attempt, refused)

    def _bulk(self, rows: pa.Table, is_delete: bool) -> dict[int, str]:
        """Write rows. Returns why some are refused, by their index.

        Raises:
            RowsRefused: A request cannot be made, or is refused as a whole: it wrote nothing.
        """
        (batch,) = rows.combine_chunks().to_batches()
        ids = _ids(batch, self.shape.key)
        texts = [] if is_delete else rows_to_json(batch)
        version = (self._generation << _BATCH_BITS) | self._batches
        verb = "delete" if is_delete else "index"
        lines: list[bytes] = []
        for index, key in enumerate(ids):
            if len(key.encode()) > MAX_ID_BYTES:
                if rows.num_rows == 1:
                    raise RowsRefused(f"its key is longer than {MAX_ID_BYTES} bytes")
                raise RowsRefused("a key is too long")
            action = (
                f'{{"{verb}":{{"_id":{json.dumps(key)},"version":{version},'
                f'"version_type":"external_gte"}}}}\n'
            )
            text = b"" if is_delete else texts[index] + b"\n"
            lines.append(action.encode() + text)
        reasons: dict[int, str] = {}
        start = size = 0
        for stop, line in enumerate(lines):
            if size and size + len(line) > MAX_BULK_BYTES:
                self._send(lines[start:stop], start, reasons)
                start, size = stop, 0
            size += len(line)
        self._send(lines[start:], start, reasons)
        return reasons

    def _send(self, lines: Sequence[bytes], first: int, reasons: dict[int, str]) -> None:
        response = self._server.request(
            "POST",
            f"/{self._index}/_bulk?filter_path=errors,items.*.status,items.*.error",
            lines=b"".join(lines),
        )
        if not response.is_success:
            raise RowsRefused(response.reason)
        if not response.body["errors"]:
            return
        for index, item in enumerate(response.body["items"]):
            (result,) = item.values()
            status = result["status"]
            if status < HTTPStatus.BAD_REQUEST or "error" not in result:  # 404: was deleted before
                continue
            reason = shorten(_reason(result["error"]))
            kind = result["error"].get("type", "")
            if status in _TEMPORARY or kind in {_BLOCKED, _NO_INDEX}:
                raise TargetUnavailable(
                    f"{self._server.name}: {reason}",
                    fix="see what the server's log says, and whether its disk is full.",
                )
            if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
                raise ConfigurationError(
                    f"{self._server.name} refuses to write: {reason}",
                    fix=f"let this user write to the index {self.table!r}.",
                )
            if status == HTTPStatus.CONFLICT:
                self._raise_conflict(reason)
            reasons[first + index] = reason

    def _raise_conflict(self, reason: str) -> None:
        """A document has a version that this session did not give it."""
        document = self._checkpoint_document()
        if document is None or self._document is None:
            raise TargetUnavailable("The checkpoint of the index is gone.")
        if document["_seq_no"] != self._document["_seq_no"]:
            raise TargetUnavailable(
                "Another process writes to this index.", fix="nothing: it is looked at again."
            )
        raise TargetMismatch(
            f"Somebody else gives versions to documents of the index {self.table!r}: {reason}",
            fix=(
                "let only this sink write documents to it, or choose another index with table=…"
                " (--table …)."
            ),
        )

    def clear(self) -> None:
        """Remove all documents. That takes more than one request: until the next checkpoint is
        stored, a document says that this has begun, and whoever comes next begins again.
        """
        self._store(
            {
                "checkpoint": None,
                "cleared_by": self._beginning_owner,
                "index_uuid": self._uuid,
                "generation": self._generation,
            }
        )
        self._batches += 1
        version = (self._generation << _BATCH_BITS) | self._batches
        while self._count():
            for hits in self._scroll({"_source": False}):
                lines = [
                    (
                        f'{{"delete":{{"_id":{json.dumps(hit["_id"])},"version":{version},'
                        f'"version_type":"external_gte"}}}}\n'
                    ).encode()
                    for hit in hits
                ]
                reasons: dict[int, str] = {}
                self._send(lines, 0, reasons)
                if reasons:
                    raise TargetMismatch(
                        f"A document of the index {self.table!r} cannot be removed:"
                        f" {next(iter(reasons.values()))}",
                        fix="delete the index, and start the sink without --start-over.",
                    )

    # Reading back

    def _refresh(self) -> None:
        self._server.request("POST", f"/{self._index}/_refresh")

    def _count(self) -> int:
        self._refresh()
        response = self._server.request("GET", f"/{self._index}/_count")
        if not response.is_success:
            raise TargetUnavailable(f"{self._server.name}: {response.reason}")
        return int(response.body["count"])

    def _scroll(self, options: dict[str, Any]) -> Iterator[list[Any]]:
        """Yield the documents that the index has now, some at a time."""
        query = {"size": PAGE_ROWS, "sort": ["_doc"], **options}
        response = self._server.request("POST", f"/{self._index}/_search?scroll={SCROLL}", query)
        scroll_id = None
        try:
            while True:
                if not response.is_success:
                    raise TargetUnavailable(f"{self._server.name}: {response.reason}")
                if response.body.get("timed_out") or response.body["_shards"]["failed"]:
                    raise TargetUnavailable(
                        f"A part of the index {self.table!r} cannot be read.",
                        fix="see that all its shards are assigned.",
                    )
                scroll_id = response.body["_scroll_id"]
                hits = response.body["hits"]["hits"]
                if not hits:
                    return
                yield hits
                response = self._server.request(
                    "POST", "/_search/scroll", {"scroll": SCROLL, "scroll_id": scroll_id}
                )
        finally:
            if scroll_id is not None:
                with suppress(TargetUnavailable):
                    self._server.request("DELETE", "/_search/scroll", {"scroll_id": [scroll_id]})

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        """Return checkpoint and rows. While a sink writes, a part of its next batch may be there
        already.
        """
        for _ in range(SNAPSHOT_ATTEMPTS):
            self._look()
            checkpoint = self.read_checkpoint()
            self._refresh()
            pages = self._scroll({})
            first = next(pages, [])
            after = self._checkpoint_document()
            if _sequence(after) == _sequence(self._document):
                break
        return checkpoint, self._tables(first, pages)

    def _tables(self, first: list[Any], pages: Iterator[list[Any]]) -> Iterator[pa.Table]:
        if first:
            yield convert_readable(first, self._converted, self.unreadable.add)
        for hits in pages:
            yield convert_readable(hits, self._converted, self.unreadable.add)

    def lookup(self, keys: pa.Table) -> pa.Table:
        tables = [self.shape.schema.empty_table()]
        for start in range(0, keys.num_rows, MAX_BULK_ROWS):
            (chunk,) = keys.slice(start, MAX_BULK_ROWS).combine_chunks().to_batches()
            ids = [key for key in _ids(chunk, self.shape.key) if len(key.encode()) <= MAX_ID_BYTES]
            if not ids:
                continue
            response = self._server.request("POST", f"/{self._index}/_mget", {"ids": ids})
            if not response.is_success or any("error" in found for found in response.body["docs"]):
                raise TargetUnavailable(f"{self._server.name}: rows cannot be read back.")
            found = [document for document in response.body["docs"] if document["found"]]
            tables.append(convert_readable(found, self._converted, refuse_unreadable))
        return pa.concat_tables(tables)

    def _converted(self, hits: Sequence[Any]) -> pa.Table:
        texts = [json.dumps(hit["_source"], ensure_ascii=False).encode() for hit in hits]
        decoded = decode_rows(texts, self.shape.schema)
        if decoded.misfits:
            raise ValueError(next(iter(decoded.misfits.values())))
        return pa.Table.from_batches([decoded.batch])


def _sequence(document: dict[str, Any] | None) -> int | None:
    return None if document is None else int(document["_seq_no"])


def _ids(rows: pa.RecordBatch, key: tuple[str, ...]) -> list[str]:
    """Return the ids of the documents of rows, or of keys."""
    columns = [rows.column(name) for name in key]
    if len(columns) > 1:
        several: list[str] = array_text(columns).to_pylist()
        return several
    (column,) = columns
    if pa.types.is_string(column.type):
        is_array = pc.or_(pc.equal(column, ""), pc.starts_with(column, "["))
        ids: list[str] = pc.if_else(is_array, array_text([column]), column).to_pylist()
        return ids
    return [text.strip('"') for text in json_text(column).to_pylist()]


def _field_mapping(kind: pa.DataType) -> dict[str, Any]:
    """Return how a field is indexed."""
    if pa.types.is_list(kind):
        return _field_mapping(kind.value_type)
    if kind == VARIANT_TYPE or pa.types.is_map(kind):
        return {"type": "object", "enabled": False}
    if pa.types.is_struct(kind):
        return {"properties": {field.name: _field_mapping(field.type) for field in kind}}
    if kind in _FIELD_TYPES:
        return {"type": _FIELD_TYPES[kind]}
    if pa.types.is_decimal(kind):
        return {"type": "double"}
    if pa.types.is_binary(kind):
        return {"type": "binary"}
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return {"type": "date"}
    if pa.types.is_duration(kind):
        return {"type": "long"}
    if pa.types.is_time(kind):
        return {"type": "keyword"}
    keyword = {"type": "keyword", "ignore_above": _IGNORE_ABOVE}
    return {"type": "text", "fields": {"keyword": keyword}}
