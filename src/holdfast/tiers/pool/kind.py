"""The tier kind `pool`: network-attached flash nodes, listed by a membership source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from holdfast.errors import ConfigError, HoldfastError
from holdfast.finding import Finding, problem
from holdfast.limits import STRIPE_MEMBERS_MIN, STRIPE_TARGETS, STRIPE_TARGETS_MAX
from holdfast.tiers.base import Tier
from holdfast.tiers.kind import RecordTierSection, TierContext, TierKind
from holdfast.tiers.option_checks import DEADLINE_S_MAX, check_above_zero

if TYPE_CHECKING:
    from holdfast.membership.members import Member
    from holdfast.wire.remote.client import TargetClient

RAMP_S_MAX = 86_400.0
LIST_S = 5.0
"""Maximum wait for the member list when a pool is examined, in seconds."""
MEMBERS_S = 1.0
"""Maximum wait for the first member list at the start, in seconds, for the first requests."""


class PoolOptions(RecordTierSection, frozen=True, tag="pool", tag_field="kind"):
    """A pool of targets; times in seconds.

    `deadline_s` bounds one read or write call to a target, `ask_s` one lookup.

    `members`: a YAML file, or dns://NAME:PORT, dns://_SERVICE._tcp.NAME,
    kubernetes://[NAMESPACE/]SERVICE[:PORT] or etcd://HOST:PORT[,HOST:PORT][/PREFIX]. A suffix
    ?ca=FILE&cert=FILE&key=FILE enables TLS to etcd (cert and key if etcd requires a client's).
    `ramp_s`: time in which the share of a joining target grows from a sixteenth to its full share.
    `stripe_targets`: most targets over which a segment is striped; 1: each is on one target.
    """

    members: str
    deadline_s: float = 2.0
    ask_s: float = 0.25
    ramp_s: float = 300.0
    stripe_targets: int = STRIPE_TARGETS


def check_pool(options: PoolOptions, at: str) -> None:
    """Raise ConfigError for a time or a number out of range."""
    check_above_zero(f"{at}.deadline_s", options.deadline_s, DEADLINE_S_MAX)
    check_above_zero(f"{at}.ask_s", options.ask_s, DEADLINE_S_MAX)
    check_above_zero(f"{at}.ramp_s", options.ramp_s, RAMP_S_MAX)
    least, stripe = STRIPE_MEMBERS_MIN, options.stripe_targets
    if stripe != 1 and not least <= stripe <= STRIPE_TARGETS_MAX:
        raise ConfigError(
            f"{at}.stripe_targets: {stripe} is neither 1 nor {least} to {STRIPE_TARGETS_MAX}; "
            "choose another, the same on all nodes that share a pool"
        )


def open_pool(options: PoolOptions, context: TierContext) -> Tier:
    """Watch the member list; connect to members at their first use."""
    from holdfast.membership.membership import MembershipOptions
    from holdfast.membership.open_source import open_source
    from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions

    tier_options = PoolTierOptions(
        deadline_s=options.deadline_s,
        ask_s=options.ask_s,
        segment_blocks=context.segment_blocks,
        stripe_targets=options.stripe_targets,
        membership=MembershipOptions(ramp_s=options.ramp_s),
    )
    source = open_source(options.members, f"{context.at}.members")
    tier = PoolTier(source, _connector(context), tier_options, name=context.name)
    tier.wait_listed(MEMBERS_S)
    return tier


def examine_pool(options: PoolOptions, context: TierContext) -> Iterator[Finding]:
    """Read the member list once, and check the connection to each member."""
    from holdfast.tiers.pool.connection_checks import TargetCondition, check_members
    from holdfast.wire.remote.expiry import certificate_state, credential_finding
    from holdfast.wire.remote.token import limits_of

    found = f"pool, members from {options.members}"
    for name, file in parse_qsl(urlsplit(options.members).query):  # of etcd
        if name in ("ca", "cert"):
            yield credential_finding(certificate_state(f"{context.at}.members {name}", file))
    try:
        members = _listed(options, context.at)
        checks = check_members(members, _connector(context))
    except HoldfastError as error:
        yield problem(context.at, found, str(error))
        return
    count = f"{len(members)} member" + "s" * (len(members) != 1)
    if context.credentials and (limits := limits_of(context.credentials.may())):
        count += f", {limits}"
    yield Finding(context.at, found, count, ok=True)
    for member, check in zip(members, checks, strict=True):
        where = f"{member.id} at {member.address}, {member.state}"
        if check.condition is TargetCondition.FINE:
            yield Finding(context.at, where, f"fine, {1e3 * check.seconds:.1f} ms", ok=True)
        else:
            yield problem(context.at, where, check.text())


def _listed(options: PoolOptions, at: str) -> list[Member]:
    """Read the member list once; raise ConfigError if there is none."""
    from holdfast.membership.open_source import open_source

    source, listed = open_source(options.members, f"{at}.members"), threading.Event()
    members: list[Member] = []

    def receive(listing: Sequence[Member]) -> None:
        members[:] = listing
        listed.set()

    source.watch(receive)
    try:
        if not listed.wait(LIST_S):
            why = source.trouble() or f"no list within {LIST_S:g} s"
            raise ConfigError(f"{at}.members: {why}")
    finally:
        source.close()
    return list(members)


def _connector(context: TierContext) -> Callable[[Member], TargetClient]:
    from holdfast.wire.remote.buffer_pool import TransferBuffers
    from holdfast.wire.remote.client import TargetClient
    from holdfast.wire.remote.nixl import wanted

    credentials, transport = context.credentials, context.transport
    transfer_buffers = TransferBuffers() if wanted(transport) else None
    return lambda member: TargetClient(
        member.address, credentials, transfer_buffers=transfer_buffers, tls_name=member.tls_name
    )


KIND = TierKind(
    options=PoolOptions,
    open=open_pool,
    shared=True,
    check=check_pool,
    examine=examine_pool,
    paths=("members",),
)
