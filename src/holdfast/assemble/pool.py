"""A pool from its configuration: who says who the members are, and how they are reached."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qsl, urlsplit

from holdfast.config import Config, PoolOptions
from holdfast.errors import ConfigError, MembershipError
from holdfast.tiers.pool.etcd import EtcdOptions
from holdfast.tiers.pool.http_json import TlsFiles as EtcdTls
from holdfast.tiers.pool.member_dns import MemberDns
from holdfast.tiers.pool.member_etcd import MemberEtcd
from holdfast.tiers.pool.member_file import MemberFile
from holdfast.tiers.pool.member_kubernetes import KubernetesOptions, MemberKubernetes
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.membership import MembershipOptions, MembershipSource
from holdfast.tiers.pool.tier import PoolOptions as TierOptions
from holdfast.tiers.pool.tier import PoolTier
from holdfast.wire.credentials import Credentials, TlsFiles
from holdfast.wire.nixl import wanted
from holdfast.wire.target import Target
from holdfast.wire.window import Road


def open_pool(config: Config, options: PoolOptions, at: str, name: str) -> PoolTier:
    """Watch the members and connect to them as they are needed; `at` is the tier's key path."""
    tls = config.tls
    credentials = Credentials(
        TlsFiles(tls.cert, tls.key, tls.ca) if tls else None, config.tokens.file
    )

    road = Road() if wanted(config.transport) else None

    def reach(member: Member) -> Target:
        return Target(member.address, credentials, road=road)

    membership = MembershipOptions(ramp_s=options.ramp_s)
    known = TierOptions(
        deadline_s=options.deadline_s,
        ask_s=options.ask_s,
        segment_blocks=config.segment_blocks,
        membership=membership,
    )
    return PoolTier(_source(options.members, f"{at}.members"), reach, known, name=name)


def _source(members: str, at: str) -> MembershipSource:
    scheme, separator, rest = members.partition("://")
    if not separator:
        return MemberFile(members)
    opener = _SOURCES.get(scheme)
    if opener is None or not rest:
        known = ", ".join(f"{scheme}://" for scheme in _SOURCES)
        raise ConfigError(f"{at}: {members!r} is no source; give a YAML file, or one of {known}")
    try:
        return opener(members)
    except MembershipError as error:
        raise ConfigError(f"{at}: {error}") from error


def _dns(members: str) -> MembershipSource:
    return MemberDns(members.removeprefix("dns://"))


def _kubernetes(members: str) -> MembershipSource:
    path, _, port = members.removeprefix("kubernetes://").partition(":")
    namespace, _, service = path.rpartition("/")
    return MemberKubernetes(KubernetesOptions(service=service, namespace=namespace, port=port))


def _etcd(members: str) -> MembershipSource:
    return MemberEtcd(etcd_options(members))


def etcd_options(members: str) -> EtcdOptions:
    """Read etcd://HOST:PORT[,HOST:PORT][/PREFIX][?ca=FILE[&cert=FILE&key=FILE]].

    With `ca` it is TLS. Raises MembershipError for other parameters, and files that do not do.
    """
    parts = urlsplit(members)
    tls = _etcd_tls(parts.query)
    scheme = "https" if tls.ca else "http"
    endpoints = tuple(f"{scheme}://{server}" for server in parts.netloc.split(","))
    if parts.path.strip("/"):
        return EtcdOptions(endpoints=endpoints, prefix=f"{parts.path.rstrip('/')}/", tls=tls)
    return EtcdOptions(endpoints=endpoints, tls=tls)


def _etcd_tls(query: str) -> EtcdTls:
    found = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := found.keys() - {"ca", "cert", "key"}:
        raise MembershipError(
            f"etcd: {', '.join(sorted(unknown))}: no such parameter; ca, cert and key are files"
        )
    tls = EtcdTls(found.get("ca", ""), found.get("cert", ""), found.get("key", ""))
    if query and (not tls.ca or bool(tls.certificate) != bool(tls.key)):
        raise MembershipError(
            f"etcd: {query!r}: name ca, the file that signs the server's certificate; and, if it "
            "wants ours, cert and key"
        )
    if tls.ca:
        tls.context()
    return tls


_SOURCES: dict[str, Callable[[str], MembershipSource]] = {
    "dns": _dns,
    "kubernetes": _kubernetes,
    "etcd": _etcd,
}
