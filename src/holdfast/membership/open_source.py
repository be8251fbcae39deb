"""Open the source of a pool's member list from its address in a configuration."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qsl, urlsplit

from holdfast.errors import ConfigError, MembershipError
from holdfast.membership.dns_source import DnsSource
from holdfast.membership.etcd_client import EtcdOptions
from holdfast.membership.etcd_source import EtcdSource
from holdfast.membership.file_source import FileSource
from holdfast.membership.http_json import HttpTlsFiles
from holdfast.membership.kubernetes_source import KubernetesOptions, KubernetesSource
from holdfast.membership.membership import MembershipSource


def open_source(members: str, at: str) -> MembershipSource:
    """Open a file, or dns://, kubernetes:// or etcd://; `at` is the option's key path.

    Raises ConfigError for other addresses.
    """
    scheme, separator, rest = members.partition("://")
    if not separator:
        return FileSource(members)
    opener = _SOURCES.get(scheme)
    if opener is None or not rest:
        known = ", ".join(f"{scheme}://" for scheme in _SOURCES)
        raise ConfigError(f"{at}: {members!r} is not a source; give a YAML file, or one of {known}")
    try:
        return opener(members)
    except MembershipError as error:
        raise ConfigError(f"{at}: {error}") from error


def _dns(members: str) -> MembershipSource:
    return DnsSource(members.removeprefix("dns://"))


def _kubernetes(members: str) -> MembershipSource:
    path, _, port = members.removeprefix("kubernetes://").partition(":")
    namespace, _, service = path.rpartition("/")
    return KubernetesSource(KubernetesOptions(service=service, namespace=namespace, port=port))


def _etcd(members: str) -> MembershipSource:
    return EtcdSource(etcd_options(members))


def etcd_options(members: str) -> EtcdOptions:
    """Read etcd://HOST:PORT[,HOST:PORT][/PREFIX][?ca=FILE[&cert=FILE&key=FILE]].

    `ca` selects TLS. Raises MembershipError for unknown parameters and unusable files.
    """
    parts = urlsplit(members)
    tls = _etcd_tls(parts.query)
    scheme = "https" if tls.ca else "http"
    endpoints = tuple(f"{scheme}://{server}" for server in parts.netloc.split(","))
    if parts.path.strip("/"):
        return EtcdOptions(endpoints=endpoints, prefix=f"{parts.path.rstrip('/')}/", tls=tls)
    return EtcdOptions(endpoints=endpoints, tls=tls)


def _etcd_tls(query: str) -> HttpTlsFiles:
    found = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := found.keys() - {"ca", "cert", "key"}:
        raise MembershipError(
            f"etcd: {', '.join(sorted(unknown))}: unknown parameter; ca, cert and key are files"
        )
    tls = HttpTlsFiles(found.get("ca", ""), found.get("cert", ""), found.get("key", ""))
    if query and (not tls.ca or bool(tls.certificate) != bool(tls.key)):
        raise MembershipError(
            f"etcd: {query!r}: name ca, the file with the CA of the server's certificate; and, "
            "if it requires client certificates, cert and key"
        )
    if tls.ca:
        tls.context()
    return tls


_SOURCES: dict[str, Callable[[str], MembershipSource]] = {
    "dns": _dns,
    "kubernetes": _kubernetes,
    "etcd": _etcd,
}
