"""What object stores need besides a URL: credentials of the environment, and errors that say which
are missing. For the sinks `parquet` and `delta`, whose drivers look for credentials in the same
variables and report failures in similar words.
"""

from __future__ import annotations

import os
import re

from headrace.errors import HeadraceError, TargetMismatch, TargetUnavailable

_FAMILIES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "azure": "az",
}
CREDENTIALS = {
    "s3": (
        "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or AWS_PROFILE; and"
        " AWS_ENDPOINT_URL for a server that is not Amazon's. The sink reads, writes, lists and"
        " deletes objects below the URL."
    ),
    "gs": (
        "set GOOGLE_APPLICATION_CREDENTIALS to the path of a key file whose account may read,"
        " write, list and delete objects below the URL."
    ),
    "az": (
        "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN)"
        " of an account that may read, write, list and delete blobs below the URL."
    ),
}
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
_NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|/latest/(api/token|meta-data)|metadata\.google\.internal"
)
_REFUSED = re.compile("AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
MAX_TEXT = 500


def family_of(url: str) -> str | None:
    """Return which protocol a URL stands for: "s3", "gs" or "az"; None for another one, or a
    path.
    """
    scheme, separator, _ = url.partition("://")
    return _FAMILIES.get(scheme) if separator else None


def is_plain_http(url: str) -> bool:
    """Return whether the environment names a server of S3 without TLS, such as a local one."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next((text for name in names if (text := os.environ.get(name))), "")
    return family_of(url) == "s3" and endpoint.startswith("http://")


def access_error(url: str, message: str, *, is_refused: bool = False) -> HeadraceError | None:
    """Return the error that a driver's message stands for: there is no bucket, no access, or there
    are no credentials. None if it is about something else.

    Args:
        url: The place in the object store.
        message: What the driver says.
        is_refused: Whether the driver says so by the class of its error.
    """
    family = family_of(url)
    if family is None:
        return None
    text = shorten_message(message)
    if _NO_BUCKET.search(message):
        return TargetMismatch(
            f"There is no bucket for {url}: {text}.",
            fix="create the bucket, which the sink does not do; or correct the URL.",
        )
    if is_refused or _REFUSED.search(message):
        return TargetMismatch(f"{url} refuses access: {text}.", fix=CREDENTIALS[family])
    if _NO_CREDENTIALS.search(message):
        return TargetUnavailable(
            f"There are no credentials for {url}: none are in the environment, and this machine has"
            f" no role that gives some ({text}).",
            fix=CREDENTIALS[family],
        )
    return None


def shorten_message(message: str) -> str:
    """Return a driver's message in one line, without colours and details for its developers."""
    text = _COLOURS.sub("", message).partition("\n\nDebug source")[0]
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
