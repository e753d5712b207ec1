"""Object stores as places for files: S3 and what speaks its protocol, Google Cloud Storage, Azure.

An object appears completely or not at all, listings are consistent, and a conditional request
creates an object only if its name is free. That is all that a table of files needs. Some servers
that speak the protocol of S3 ignore the condition: `check_publishing` tries it out.

Credentials come from where the tools of each provider look for them: the environment, the machine's
role, and for S3 the profiles of `~/.aws`, if the package `boto3` is installed.
"""

from __future__ import annotations

import io
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import ConfigurationError, MissingExtra, TargetMismatch, TargetUnavailable
from headrace.sinks.files.file_store import COMPRESSION, FileStore
from headrace.sinks.files.object_store_access import (
    CREDENTIALS,
    access_error,
    family_of,
    is_plain_http,
    shorten_message,
)

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        UnauthenticatedError,
    )
    from obstore.store import from_url
except ImportError as error:
    raise MissingExtra("obstore", "objectstore") from error

_REQUESTS: Mapping[str, str] = {"connect_timeout": "5s", "timeout": "60s"}
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
_DELETES_A_REQUEST = 1000


class ObjectFileStore(FileStore):
    """A prefix of a bucket."""

    def __init__(self, url: str) -> None:
        self.url = url
        options: dict[str, Any] = {"client_options": dict(_REQUESTS)}
        if is_plain_http(url):
            options["client_options"]["allow_http"] = True
        if family_of(url) == "s3" and (provider := _aws_profile_credentials()) is not None:
            options["credential_provider"] = provider
        with self.errors():
            self._store: Any = from_url(url, retry_config=_RETRIES, **options)

    def close(self) -> None:
        """Connections are pooled, and closed when nobody uses them."""

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        is_refused = isinstance(error, (PermissionDeniedError, UnauthenticatedError))
        return access_error(self.url, str(error), is_refused=is_refused) or TargetUnavailable(
            f"{self.url}: {shorten_message(str(error))}.",
            fix="see that the object store can be reached.",
        )

    def prepare(self, *, create: bool) -> None:  # noqa: ARG002 - prefixes need not be created
        """Make sure that the bucket can be listed."""
        next(iter(obstore.list(self._store, "_headrace")), None)

    def check_publishing(self, folder: str) -> None:
        name = f"{folder}/probe-{uuid.uuid4().hex}"
        try:
            if self.publish(name, b"1") and self.publish(name, b"2"):
                raise TargetMismatch(
                    f"The server of {self.url} ignores the condition If-None-Match, so that two"
                    " processes could replace each other's commits.",
                    fix=(
                        "use a server with conditional writes: S3, Google Cloud Storage, Azure, or"
                        " a recent version of MinIO, Ceph or R2."
                    ),
                )
        finally:
            self.delete([name])

    def names(self, folder: str = "", *, suffix: str) -> list[str]:
        prefix = folder or None
        found = (entry["path"] for page in obstore.list(self._store, prefix) for entry in page)
        skip = len(folder) + 1 if folder else 0
        return sorted(
            name
            for name in found
            if name.endswith(suffix)
            and not any(part.startswith("_") for part in name[skip:].split("/")[:-1])
        )

    def write_rows(self, name: str, rows: pa.Table) -> int:
        buffer = io.BytesIO()
        pq.write_table(rows, buffer, compression=COMPRESSION)
        content = buffer.getvalue()
        obstore.put(self._store, name, content)
        return len(content)

    def sync(self) -> None:
        """An object that was written is durable."""

    def read(self, name: str) -> pa.Buffer:
        return pa.py_buffer(obstore.get(self._store, name).bytes())

    def read_rows(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        return pq.read_table(
            pa.BufferReader(self.read(name)), columns=None if columns is None else list(columns)
        )

    def open_rows(self, name: str) -> pq.ParquetFile:
        """Copy the object to a temporary file and open that. Its name goes at once, and its disk
        space when it is closed.
        """
        with tempfile.NamedTemporaryFile(suffix=".parquet") as copy:
            for chunk in obstore.get(self._store, name).stream():
                copy.write(chunk)
            copy.flush()
            return pq.ParquetFile(copy.name)

    def publish(self, name: str, content: bytes) -> bool:
        try:
            obstore.put(self._store, name, content, mode="create")
        except AlreadyExistsError:
            # A request whose response was lost may have been sent twice.
            stored: bytes = self.read(name).to_pybytes()
            return stored == content
        return True

    def delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DELETES_A_REQUEST):
            obstore.delete(self._store, list(names[start : start + _DELETES_A_REQUEST]))


def _aws_profile_credentials() -> Any:
    """Return what reads the credentials of a profile of `~/.aws`; None if the environment has
    credentials, or there are no profiles.
    """
    direct = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
    container = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    profile = os.environ.get("AWS_PROFILE")
    if not profile and any(os.environ.get(name) for name in (*direct, *container)):
        return None
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    if not profile and not Path(file).expanduser().exists():
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ConfigurationError(
            "The credentials are in a profile of ~/.aws, and the package 'boto3', which reads"
            " profiles, is not installed.",
            fix="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ) from error
    try:
        return Boto3CredentialProvider()
    except Exception as error:  # boto3 has many classes of errors, and one of them is a ValueError
        raise ConfigurationError(
            f"The profiles of ~/.aws give no credentials: {error}.", fix=CREDENTIALS["s3"]
        ) from error
