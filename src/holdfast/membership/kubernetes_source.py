"""Pool members from the EndpointSlices of a Kubernetes service: listed once, then watched.

A ready pod is `serving`, a terminating one `draining`, and one that is not ready is left out, so
`Membership` removes it after `dead_after_s`. Pods of a StatefulSet keep their names over restarts,
and therefore their segments; their addresses change, so with TLS their certificates have the DNS
names that Kubernetes gives them, HOSTNAME.SERVICE.NAMESPACE.svc. The service account needs `list`
and `watch` on `endpointslices` (discovery.k8s.io).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

import msgspec

from holdfast.address import tcp_address
from holdfast.errors import MembershipError
from holdfast.limits import MIB
from holdfast.membership.http_json import HttpJson, HttpStatusError, HttpTlsFiles
from holdfast.membership.member_list import MEMBERS_MAX, read_member
from holdfast.membership.members import Member, MemberState
from holdfast.membership.poller import PolledSource
from holdfast.prepared import prepared
from holdfast.regular_file import read_regular

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
GONE = 410
FORBIDDEN = (401, 403)
WATCH_S = 240
"""Duration of one watch, set by the request; the next one continues where it ended."""

_PAUSE_S, _PAUSE_MAX_S = 0.2, 15.0
_SILENCE_S = WATCH_S + 30.0


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A service, the API server and the credentials for it. The defaults are those inside a pod.

    `port` is the name or number of the service's port; empty takes the first. An empty
    `namespace` is read from the service account's folder.
    """

    service: str
    namespace: str = ""
    port: str = ""
    server: str = "https://kubernetes.default.svc"
    token_file: str = f"{ACCOUNT}/token"
    namespace_file: str = f"{ACCOUNT}/namespace"
    ca_file: str = f"{ACCOUNT}/ca.crt"
    timeout_s: float = 5.0


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct):
    name: str = ""
    uid: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    target_ref: _Target | None = None
    zone: str | None = None
    hostname: str | None = None


class _Port(msgspec.Struct):
    name: str | None = ""
    port: int | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


@prepared
class _Slice(msgspec.Struct, rename="camel"):
    """An EndpointSlice, or a Status, which has an HTTP `code` and a `message`."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    address_type: str = ""
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None
    code: int = 0
    message: str = ""


@prepared
class _Slices(msgspec.Struct):
    metadata: _Metadata
    items: list[_Slice] | None = None


@prepared
class _Event(msgspec.Struct):
    type: str
    object: _Slice


class KubernetesSource(PolledSource):
    """A `MembershipSource` that watches one service."""

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        self._http = HttpJson(
            options.server, HttpTlsFiles(ca=options.ca_file), self._token, options.timeout_s
        )
        self._slices: dict[str, _Slice] = {}
        self._version = ""
        name = f"members of service {options.service}"
        super().__init__(name, _PAUSE_S, _PAUSE_MAX_S, self._http.interrupt)

    def _one_round(self) -> None:
        """List the service's slices, unless the last watch may be continued, then watch them."""
        try:
            if not self._version:
                found = self._http.call("GET", self._target({}), _Slices)
                self._slices = {each.metadata.name: each for each in found.items or ()}
                self._version = found.metadata.resource_version
                self._tell_slices()
            self._follow()
        except MembershipError as error:
            self._version = ""
            if isinstance(error, HttpStatusError) and error.status in FORBIDDEN:
                raise MembershipError(
                    f"{error}; allow list and watch of endpointslices (discovery.k8s.io) to the "
                    f"service account of {self._options.token_file}"
                ) from error
            raise

    def _follow(self) -> None:
        """Apply events until the server ends the watch; the next watch continues there."""
        target = self._target(
            {
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": self._version,
                "timeoutSeconds": str(WATCH_S),
            }
        )
        for event in self._http.stream("GET", target, _Event, None, _SILENCE_S):
            each = event.object
            if event.type == "ERROR":
                self._version = ""  # list again next time
                if each.code == GONE:  # the resource version has expired, which is not an error
                    return
                raise MembershipError(
                    f"{self._http.url}: the watch ended: {each.code} {each.message:.300}"
                )
            self._version = each.metadata.resource_version
            if event.type == "DELETED":
                self._slices.pop(each.metadata.name, None)
            elif event.type in ("ADDED", "MODIFIED"):
                self._slices[each.metadata.name] = each
            if event.type != "BOOKMARK":
                self._tell_slices()

    def _tell_slices(self) -> None:
        options = self._options
        domain = f"{options.service}.{self._namespace()}.svc"
        members = members_of(self._slices.values(), options.port, domain)
        self.report("")
        self._tell(members)

    def _token(self) -> dict[str, str]:
        # Read for every request, because the kubelet renews it about every hour.
        token = _read(self._options.token_file)
        return {"Authorization": f"Bearer {token}"}

    def _target(self, query: Mapping[str, str]) -> str:
        label = f"kubernetes.io/service-name={self._options.service}"
        namespace = quote(self._namespace(), safe="")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return f"{path}?{urlencode({'labelSelector': label, **query})}"

    def _namespace(self) -> str:
        return self._options.namespace or _read(self._options.namespace_file)


def members_of(slices: Iterable[_Slice], port: str, domain: str = "") -> tuple[Member, ...]:
    """Return the members in these slices, one for each pod.

    `domain` is the DNS name of the service: certificates of pods with a host name have both.
    A pod may be in several slices: with IPv4 and IPv6, or while the cluster moves it from one slice
    to another. Its first state in the order of `MemberState` counts, then IPv4.
    """
    found: dict[str, tuple[int, Member]] = {}
    for each in sorted(slices, key=lambda one: (one.address_type, one.metadata.name)):
        matching = (p.port for p in each.ports or () if port in ("", p.name, str(p.port)))
        number = next(matching, None)
        for endpoint in each.endpoints or ():
            state = _state(endpoint.conditions)
            if number is None or state is None or not endpoint.addresses:
                continue
            address, target = endpoint.addresses[0], endpoint.target_ref or _Target()
            data = {
                "id": target.name or address,
                "address": tcp_address(address, number),
                "zone": endpoint.zone or "",
                "state": state,
                "incarnation": target.uid,
                "tls_name": f"{endpoint.hostname}.{domain}" if endpoint.hostname else "",
            }
            member = read_member(data, f"endpoint {address}")
            rank = list(MemberState).index(state)
            if member.id not in found or rank < found[member.id][0]:
                found[member.id] = rank, member
    if len(found) > MEMBERS_MAX:
        raise MembershipError(f"{len(found)} endpoints, at most {MEMBERS_MAX}; split the pool")
    return tuple(member for _, member in found.values())


def _state(conditions: _Conditions) -> MemberState | None:
    """Return the state of a pod; None if it cannot serve. A missing `ready` means ready."""
    if conditions.terminating:
        return MemberState.DRAINING if conditions.serving else None
    return None if conditions.ready is False else MemberState.SERVING


def _read(path: str) -> str:
    try:
        return read_regular(Path(path), MIB).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MembershipError(f"{path}: {error}; outside a pod, name the file to read") from error
