"""The tier kind `object`: a bucket of an object store that exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.byte_size import Size
from holdfast.errors import ConfigError, HoldfastError
from holdfast.finding import Finding, problem
from holdfast.tiers.kind import TierContext, TierKind
from holdfast.tiers.option_checks import check_at_least
from holdfast.tiers.segments.options import (
    CAPACITY_MIN,
    EXAMINE_S,
    SegmentTierSection,
    check_times,
    keep_s,
    open_segment_tier,
    probe_findings,
)

if TYPE_CHECKING:
    from holdfast.tiers.object.medium import ObjectMedium
    from holdfast.tiers.segments.tier import SegmentTier

SCHEMES = ("s3", "az", "gs")
CONNECTIONS_MAX = 256


class ObjectOptions(SegmentTierSection, frozen=True, tag="object", tag_field="kind"):
    """An existing bucket.

    `url`: s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX. `endpoint`: URL of a
    store that is not the cloud's own. `credentials_file`: lines `NAME = VALUE`, read again every
    minute; without it credentials come from the environment. `capacity` bounds the bytes below the
    prefix, of all nodes; 0 leaves them to `keep`. `connections`: most reads at a time,
    `write_connections` most writes. `tls_ca`: the CA of a private endpoint.
    """

    url: str
    endpoint: str = ""
    region: str = ""
    credentials_file: str = ""
    tls_ca: str = ""
    capacity: Size = Size(0)
    connections: int = 16
    write_connections: int = 4


def check_object(options: ObjectOptions, at: str) -> None:
    """Raise ConfigError for values out of range, and for a URL that contains credentials."""
    parts = urlsplit(options.url)
    if parts.scheme not in SCHEMES or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{at}.url: it is not s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX; "
            "write one of them"
        )
    for name, url in (("url", parts), ("endpoint", urlsplit(options.endpoint))):
        if "@" in url.netloc or url.query:
            raise ConfigError(
                f"{at}.{name}: it contains credentials; name a credentials_file, or set them in "
                "the environment"
            )
    if options.endpoint and urlsplit(options.endpoint).scheme not in ("http", "https"):
        raise ConfigError(f"{at}.endpoint: {options.endpoint!r} is not http(s)://HOST[:PORT]")
    check_times(options, at, "every listing is a paid request")
    if options.capacity:
        check_at_least(options.capacity, CAPACITY_MIN, f"{at}.capacity")
    for name in ("connections", "write_connections"):
        if not 1 <= getattr(options, name) <= CONNECTIONS_MAX:
            raise ConfigError(
                f"{at}.{name}: {getattr(options, name)} is not from 1 to {CONNECTIONS_MAX}"
            )


def open_object(options: ObjectOptions, context: TierContext) -> SegmentTier:
    """Open the tier; the store does not need to answer."""
    requests = options.connections, options.write_connections
    medium = _medium(options, context)
    return open_segment_tier(medium, options, options.capacity, requests, context.name)


def examine_object(options: ObjectOptions, context: TierContext) -> Iterator[Finding]:
    """Probe the bucket: that it exists, what the credentials permit, what the store does."""
    from holdfast.wire.remote.stream import Deadline

    where = f"object at {options.url}"
    try:
        medium = _medium(options, context)
    except HoldfastError as error:
        yield problem(context.at, where, str(error))
        return
    try:
        probe = medium.probe(Deadline.within(EXAMINE_S))
    finally:
        medium.close()
    remedy = "start it, or correct url, endpoint or keys"
    yield from probe_findings(probe, context, where, remedy)


def _medium(options: ObjectOptions, context: TierContext) -> ObjectMedium:
    """Return the medium; raise ConfigError if the library or a file cannot be used."""
    try:
        from holdfast.tiers.object.medium import ObjectMedium
        from holdfast.tiers.object.store import open_store
    except ImportError as error:
        raise ConfigError(
            f"{context.at}: a tier of kind object needs obstore ({error}); install "
            "holdfast-kv[object]"
        ) from error
    try:
        return ObjectMedium(open_store(options), options, context.name)
    except ConfigError as error:
        raise ConfigError(f"{context.at}.{error}") from error


KIND = TierKind(
    options=ObjectOptions,
    open=open_object,
    shared=True,
    check=check_object,
    examine=examine_object,
    paths=("credentials_file", "tls_ca"),
    keep_s=keep_s,
)
