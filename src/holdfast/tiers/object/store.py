"""Open an object store with obstore, by a tier's options, within our limits of time and retries.

obstore retries ten times within 180 s by default, and splits larger puts into parts. Here a request
is retried once, the tier's deadlines end it, and a put is one request.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from obstore.exceptions import BaseError, NotFoundError
from obstore.store import AzureStore, GCSStore, S3Store

from holdfast.errors import ConfigError
from holdfast.regular_file import check_regular

if TYPE_CHECKING:
    from holdfast.tiers.object.kind import ObjectOptions

Store: TypeAlias = S3Store | AzureStore | GCSStore

ABSENT = (NotFoundError, FileNotFoundError)
"""Exceptions of obstore for an object, or a bucket, that does not exist."""

CREDENTIALS_S = 60.0
"""Interval at which a credentials file is read again, in seconds."""

CONNECT_S = 2.0

_FILE_BYTES_MAX = 64 << 10
_LINE = re.compile(r"\s*([A-Za-z0-9_]+)\s*=\s*(.*?)\s*")
_S3_NAMES = {
    "access_key_id": "access_key_id",
    "aws_access_key_id": "access_key_id",
    "secret_access_key": "secret_access_key",
    "aws_secret_access_key": "secret_access_key",
    "session_token": "token",
    "aws_session_token": "token",
}


def open_store(options: ObjectOptions) -> Store:
    """Return the store; asks no server. Raises ConfigError, naming the option, for unusable files.

    The payload of a put is not signed over TLS, which protects it already: a signature costs more
    CPU time than the rest of a put.
    """
    parts = urlsplit(options.url)
    prefix = parts.path.strip("/") or None
    is_plain = options.endpoint.startswith("http://")
    longest_s = max(options.deadline_s, options.write_s, 20.0)
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=longest_s),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "pool_max_idle_per_host": str(options.connections + options.write_connections),
        "http1_only": True,
        "allow_http": is_plain,
    }
    if options.tls_ca:
        client["root_certificate"] = _read_file(options.tls_ca, "tls_ca")
    retry: dict[str, Any] = {
        "max_retries": 1,
        "retry_timeout": timedelta(seconds=longest_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(milliseconds=500),
            "base": 2,
        },
    }
    shared: dict[str, Any] = {"prefix": prefix, "client_options": client, "retry_config": retry}
    if options.credentials_file:
        read_credentials(options.credentials_file)  # raises now for a file that cannot be used
    try:
        if parts.scheme == "s3":
            return _open_s3(options, parts.netloc, shared, is_plain=is_plain)
        if parts.scheme == "az":
            return _open_azure(options, parts.netloc, shared)
        return _open_gcs(options, parts.netloc, shared)
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(f"url: {options.url!r} cannot be opened: {error}") from error


def read_credentials(path: str) -> dict[str, str]:
    """Return the names and values of a credentials file; raise ConfigError, without any value."""
    found = {}
    for number, line in enumerate(_read_file(path, "credentials_file").decode().splitlines(), 1):
        if not line.strip() or line.strip().startswith(("#", "[")):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"credentials_file: line {number} of {path!r} is not NAME = VALUE")
        found[match[1].lower()] = match[2]
    if not found:
        raise ConfigError(f"credentials_file: {path!r} has no line NAME = VALUE")
    return found


def _open_s3(
    options: ObjectOptions, bucket: str, shared: dict[str, Any], *, is_plain: bool
) -> S3Store:
    config: dict[str, Any] = {"region": options.region or "us-east-1"}
    if not options.region and not options.endpoint:
        config.pop("region")  # the environment's
    if options.endpoint:
        config |= {"endpoint": options.endpoint, "virtual_hosted_style_request": False}
    if not is_plain:
        config["unsigned_payload"] = True
    if options.credentials_file:
        shared = {**shared, "credential_provider": _s3_provider(options.credentials_file)}
    arguments: Any = {**shared, "config": config}
    return S3Store(bucket, **arguments)


def _s3_provider(path: str) -> Any:  # noqa: ANN401  # a callback of obstore
    def provide() -> Any:  # noqa: ANN401  # a TypedDict that exists for type checkers only
        named = {_S3_NAMES.get(name, name): text for name, text in read_credentials(path).items()}
        return {
            "access_key_id": named.get("access_key_id", ""),
            "secret_access_key": named.get("secret_access_key", ""),
            "token": named.get("token"),
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_S),
        }

    return provide


def _open_azure(options: ObjectOptions, container: str, shared: dict[str, Any]) -> AzureStore:
    config: dict[str, Any] = {}
    if options.endpoint:
        config["endpoint"] = options.endpoint
    if options.credentials_file:
        config |= read_credentials(options.credentials_file)
    arguments: Any = {**shared, "config": config or None}
    return AzureStore(container, **arguments)


def _open_gcs(options: ObjectOptions, bucket: str, shared: dict[str, Any]) -> GCSStore:
    config: dict[str, Any] = {}
    if options.endpoint:
        config["base_url"] = options.endpoint
    if options.credentials_file:
        config["service_account"] = options.credentials_file
    arguments: Any = {**shared, "config": config or None}
    return GCSStore(bucket, **arguments)


def _read_file(path: str, option: str) -> bytes:
    try:
        check_regular(Path(path))
        with Path(path).open("rb") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f"{option}: {path!r} cannot be read: {error.strerror or error}; name a readable file"
        ) from error
