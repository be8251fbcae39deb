"""The tier kind `valkey`: a Redis or Valkey server or cluster that already runs."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import ConfigError
from holdfast.finding import Finding
from holdfast.tiers.base import Tier
from holdfast.tiers.kind import RecordTierSection, TierContext, TierKind
from holdfast.tiers.option_checks import check_address, check_store_calls, examine_server

TTL_S_MAX = 10 * 365 * 86_400.0


class ValkeyOptions(RecordTierSection, frozen=True, tag="valkey", tag_field="kind"):
    """An existing Redis or Valkey server, or cluster; times in seconds.

    `address`: tcp://HOST:PORT, or a list of some servers of a cluster. `ttl_s`: lifetime of a
    record after its write; 0 leaves it to the server. TLS is used if `tls_ca` is given.
    `deadline_s` bounds one read or write, `ask_s` one lookup or deletion.
    """

    address: str | list[str]
    cluster: bool = False
    database: int = 0
    user: str = ""
    password_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    prefix: str = "holdfast"
    ttl_s: float = 0.0
    deadline_s: float = 2.0
    ask_s: float = 0.25

    @property
    def addresses(self) -> list[str]:
        """All addresses given."""
        return [self.address] if isinstance(self.address, str) else self.address


def check_valkey(options: ValkeyOptions, at: str) -> None:
    """Raise ConfigError for values out of range or that do not go together."""
    check_store_calls(options.deadline_s, options.ask_s, options.prefix, at)
    for address in options.addresses:
        check_address(address, f"{at}.address")
    if len(options.addresses) != 1 and not (options.addresses and options.cluster):
        raise ConfigError(
            f"{at}.address: {len(options.addresses)} addresses given; name one server, or some "
            "servers of a cluster and set cluster: true"
        )
    if options.database < 0 or (options.cluster and options.database):
        raise ConfigError(
            f"{at}.database: {options.database} is below 0, or given for a cluster, which has one; "
            "remove it"
        )
    if not 0 <= options.ttl_s <= TTL_S_MAX:
        raise ConfigError(
            f"{at}.ttl_s: {options.ttl_s:g} s is not from 0 to {TTL_S_MAX:.0f} s (ten years); 0 "
            "leaves it to the server"
        )
    for name, other in (("user", "password_file"), ("tls_cert", "tls_ca"), ("tls_key", "tls_cert")):
        if getattr(options, name) and not getattr(options, other):
            raise ConfigError(f"{at}.{name}: given without {other}; add it")


def open_valkey(options: ValkeyOptions, context: TierContext) -> Tier:
    """Open the tier; no server needs to answer."""
    from holdfast.tiers.valkey.tier import ValkeyTier

    try:
        return ValkeyTier(options, name=context.name, segment_blocks=context.segment_blocks)
    except ConfigError as error:
        raise ConfigError(f"{context.at}.{error}") from error


def examine_valkey(options: ValkeyOptions, context: TierContext) -> Iterator[Finding]:
    """Check that one of the servers accepts connections, and how long certificates are valid."""
    yield examine_server("valkey", options.addresses, context.at)
    if options.tls_ca:
        from holdfast.wire.remote.expiry import certificate_state, credential_finding

        for name in ("tls_ca", "tls_cert"):
            if file := getattr(options, name):
                yield credential_finding(certificate_state(f"{context.at}.{name}", file))


KIND = TierKind(
    options=ValkeyOptions,
    open=open_valkey,
    shared=True,
    check=check_valkey,
    examine=examine_valkey,
    paths=("password_file", "tls_ca", "tls_cert", "tls_key"),
)
