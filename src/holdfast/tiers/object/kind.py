"""The tier kind `object`: a bucket of an object store that exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from holdfast.byte_size import Size
from holdfast.errors import ConfigError, HoldfastError, Outcome
from holdfast.finding import Finding, problem
from holdfast.limits import MIB
from holdfast.tiers.kind import RecordTierSection, TierContext, TierKind
from holdfast.tiers.option_checks import DEADLINE_S_MAX, check_above_zero, check_at_least

if TYPE_CHECKING:
    from holdfast.tiers.object.medium import ObjectMedium
    from holdfast.tiers.segments.tier import SegmentTier

SCHEMES = ("s3", "az", "gs")
CONNECTIONS_MAX = 256
WRITE_S_MAX = 600.0
POLL_S_MAX = 3_600.0
POLL_S_MIN = 1.0
CAPACITY_MIN = 256 * MIB
EXAMINE_S = 20.0
"""Maximum duration of the probe when a tier is examined, in seconds."""


class ObjectOptions(RecordTierSection, frozen=True, tag="object", tag_field="kind"):
    """An existing bucket; times in seconds.

    `url`: s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX. `endpoint`: URL of a
    store that is not the cloud's own. `credentials_file`: lines `NAME = VALUE`, read again every
    minute; without it credentials come from the environment. `capacity` bounds the bytes below the
    prefix, of all nodes; 0 leaves them to `keep`. `keep`: how long a segment is kept after its
    write. `connections`: most reads at a time, `write_connections` most writes. `deadline_s` bounds
    one read, `write_s` one write, `ask_s` a lookup before the first listing. `poll_s`: interval
    between listings of what other nodes have written. `tls_ca`: the CA of a private endpoint.
    """

    url: str
    endpoint: str = ""
    region: str = ""
    credentials_file: str = ""
    tls_ca: str = ""
    capacity: Size = Size(0)
    keep: Literal["1d", "7d", "30d"] = "7d"
    connections: int = 16
    write_connections: int = 4
    deadline_s: float = 2.0
    write_s: float = 20.0
    ask_s: float = 0.25
    poll_s: float = 60.0


def check_object(options: ObjectOptions, at: str) -> None:
    """Raise ConfigError for values out of range, and for a URL that contains credentials."""
    parts = urlsplit(options.url)
    if parts.scheme not in SCHEMES or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{at}.url: it is not s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX"
        )
    for name, url in (("url", parts), ("endpoint", urlsplit(options.endpoint))):
        if "@" in url.netloc or url.query:
            raise ConfigError(
                f"{at}.{name}: it contains credentials; name a credentials_file, or set them in "
                "the environment"
            )
    if options.endpoint and urlsplit(options.endpoint).scheme not in ("http", "https"):
        raise ConfigError(f"{at}.endpoint: {options.endpoint!r} is not http(s)://HOST[:PORT]")
    check_above_zero(f"{at}.deadline_s", options.deadline_s, DEADLINE_S_MAX)
    check_above_zero(f"{at}.ask_s", options.ask_s, DEADLINE_S_MAX)
    check_above_zero(f"{at}.write_s", options.write_s, WRITE_S_MAX)
    check_above_zero(f"{at}.poll_s", options.poll_s, POLL_S_MAX)
    if options.poll_s < POLL_S_MIN:
        raise ConfigError(
            f"{at}.poll_s: {options.poll_s:g} s is less than {POLL_S_MIN:g} s; raise it, because "
            "every listing is a paid request"
        )
    if options.capacity:
        check_at_least(options.capacity, CAPACITY_MIN, f"{at}.capacity")
    for name in ("connections", "write_connections"):
        if not 1 <= getattr(options, name) <= CONNECTIONS_MAX:
            raise ConfigError(
                f"{at}.{name}: {getattr(options, name)} is not from 1 to {CONNECTIONS_MAX}"
            )


def open_object(options: ObjectOptions, context: TierContext) -> SegmentTier:
    """Open the tier; the store does not need to answer."""
    from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
    from holdfast.tiers.segments.writer import SegmentWriter

    limits = SegmentTierLimits(
        read_s=options.deadline_s,
        write_s=options.write_s,
        ask_s=options.ask_s,
        reads=options.connections,
        writes=options.write_connections,
        poll_s=options.poll_s,
        capacity_bytes=options.capacity,
    )
    medium = _medium(options, context)
    return SegmentTier(medium, SegmentWriter(options.keep), limits, context.name)


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
    if probe.outcome is not Outcome.OK:
        yield problem(context.at, where, f"{probe.why}; start it, or correct url, endpoint or keys")
    elif probe.refusal:
        yield problem(context.at, where, probe.refusal)
    elif probe.read_only:
        yield Finding(context.at, where, probe.read_only, ok=True, warning=True)
    else:
        yield Finding(context.at, where, "can be read and written", ok=True)
    for finding in probe.findings:
        yield Finding(f"{context.at} {finding.what}", finding.found, finding.why, finding.ok)


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
)
