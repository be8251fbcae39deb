"""Open the source of a pool's member list from its address in a configuration."""

from __future__ import annotations

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
    try:
        match scheme:
            case "dns" if rest:
                return DnsSource(rest)
            case "kubernetes" if rest:
                path, _, port = rest.partition(":")
                namespace, _, service = path.rpartition("/")
                options = KubernetesOptions(service=service, namespace=namespace, port=port)
                return KubernetesSource(options)
            case "etcd" if rest:
                return EtcdSource(etcd_options(members))
    except MembershipError as error:
        raise ConfigError(f"{at}: {error}") from error
    raise ConfigError(
        f"{at}: {members!r} is not a source; give a YAML file, or one of dns://, kubernetes://, "
        "etcd://"
    )


def etcd_options(members: str) -> EtcdOptions:
    """Read etcd://HOST:PORT[,HOST:PORT][/PREFIX][?ca=FILE[&cert=FILE&key=FILE]].

    `ca` selects TLS. Raises MembershipError for unknown parameters and unusable files.
    """
    parts = urlsplit(members)
    found = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := found.keys() - {"ca", "cert", "key"}:
        raise MembershipError(
            f"etcd: {', '.join(sorted(unknown))}: unknown parameter; ca, cert and key are files"
        )
    tls = HttpTlsFiles(found.get("ca", ""), found.get("cert", ""), found.get("key", ""))
    if parts.query and (not tls.ca or bool(tls.certificate) != bool(tls.key)):
        raise MembershipError(
            f"etcd: {parts.query!r}: name ca, the file with the CA of the server's certificate; "
            "and, if it requires client certificates, cert and key"
        )
    if tls.ca:
        tls.context()
    scheme = "https" if tls.ca else "http"
    endpoints = tuple(f"{scheme}://{server}" for server in parts.netloc.split(","))
    if parts.path.strip("/"):
        return EtcdOptions(endpoints=endpoints, prefix=f"{parts.path.rstrip('/')}/", tls=tls)
    return EtcdOptions(endpoints=endpoints, tls=tls)
