"""EndpointSlices: listed and watched from a small API server that behaves like the real one."""

import json
import queue
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from holdfast.address import tcp_endpoint
from holdfast.errors import MembershipError
from holdfast.membership import kubernetes_source
from holdfast.membership.kubernetes_source import KubernetesOptions, KubernetesSource, members_of
from holdfast.membership.members import Member, MemberState
from holdfast.testing.membership_contract import MembershipContract, ReportedViews, wait_for_trouble
from holdfast_bench.harness.certificates import Authority

PATH = "/apis/discovery.k8s.io/v1/namespaces/kv/endpointslices"
TOKEN = "token-1"


def pod(name, address, **conditions):
    return {
        "addresses": [address],
        "conditions": {"ready": True, **conditions},
        "targetRef": {"kind": "Pod", "name": name, "uid": f"uid-{name}"},
        "zone": "zone-a",
    }


def stateful_pod(name, address, **conditions):
    """A pod of a StatefulSet whose service is headless has a host name."""
    return {**pod(name, address, **conditions), "hostname": name}


def slice_of(name, *pods, version="0", port=7070, kind="IPv4"):
    return {
        "metadata": {"name": name, "resourceVersion": version},
        "addressType": kind,
        "endpoints": list(pods),
        "ports": [{"name": "metrics", "port": 9090}, {"name": "kv", "port": port}],
    }


class ApiServer(ThreadingHTTPServer):
    """Keeps slices with a history; `failing` is a status to answer with instead."""

    daemon_threads = True
    # A handler sits in its watch until told to end; nobody waits for it here.
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.slices = {}
        self.version = 100
        self.oldest = 0
        self.failing = 0
        self.watchers = []
        self.requests = []
        self.changing = threading.Lock()
        self.sent_back = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, name, *pods, **fields):
        with self.changing:
            self.version += 1
            kind = "MODIFIED" if name in self.slices else "ADDED"
            self.slices[name] = slice_of(name, *pods, version=str(self.version), **fields)
            self.tell({"type": kind, "object": self.slices[name]})

    def delete(self, name):
        with self.changing:
            self.version += 1
            gone = self.slices.pop(name)
            gone["metadata"]["resourceVersion"] = str(self.version)
            self.tell({"type": "DELETED", "object": gone})

    def tell(self, event):
        for watcher in self.watchers:
            watcher.put(event)

    def end_watches(self):
        with self.changing:
            for watcher in self.watchers:
                watcher.put(None)
            self.watchers.clear()

    def fail(self, status):
        self.failing = status
        self.end_watches()

    def stop(self):
        self.end_watches()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        target = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(target.query).items()}
        self.server.requests.append((target.path, query, self.headers["Authorization"]))
        if self.server.failing:
            self.answer(self.server.failing, {"kind": "Status", "message": "not now"})
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(401, {"kind": "Status", "message": "Unauthorized"})
        elif target.path != PATH or query["labelSelector"] != "kubernetes.io/service-name=flash":
            self.answer(404, {"kind": "Status", "message": "not found"})
        elif "watch" in query:
            self.watch(int(query["resourceVersion"]))
        else:
            with self.server.changing:
                metadata = {"resourceVersion": str(self.server.version)}
                items = list(self.server.slices.values())
            self.answer(200, {"metadata": metadata, "items": items})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def watch(self, since):
        events = queue.Queue()
        with self.server.changing:
            if since < self.server.oldest:
                events.put({"type": "ERROR", "object": {"kind": "Status", "code": 410}})
                events.put(None)
                self.server.oldest = 0
                self.server.sent_back.set()
            else:
                for each in self.server.slices.values():
                    if int(each["metadata"]["resourceVersion"]) > since:
                        events.put({"type": "MODIFIED", "object": each})
                self.server.watchers.append(events)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while event := events.get():
            self.chunk(json.dumps(event).encode() + b"\n")
        self.chunk(b"")

    def chunk(self, data):
        try:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        except OSError:
            self.close_connection = True


@pytest.fixture
def api():
    server = ApiServer()
    yield server
    server.stop()


@pytest.fixture
def account(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("kv\n")
    return tmp_path


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(kubernetes_source, "_PAUSE_S", 0.02)
    monkeypatch.setattr(kubernetes_source, "_PAUSE_MAX_S", 0.1)


def source_of(api, account, **fields):
    options = KubernetesOptions(
        service="flash",
        server=api.url,
        port="kv",
        token_file=str(account / "token"),
        namespace_file=str(account / "namespace"),
        ca_file="",
    )
    return KubernetesSource(msgspec.structs.replace(options, **fields))


class TestMemberKubernetesAsSource(MembershipContract):
    @pytest.fixture(autouse=True)
    def _api(self, api, account):
        self.api, self.account = api, account

    def make_source(self):
        return source_of(self.api, self.account)

    def publish(self, members):
        self.api.failing = 0
        pods = [pod(m.id, tcp_endpoint(m.address).host) for m in members]
        self.api.put("flash-x", *pods)

    def spoil(self):
        self.api.fail(503)


def slices(*data):
    return msgspec.convert(list(data), list[kubernetes_source._Slice])


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({"ready": True}, MemberState.SERVING),
        ({"ready": None}, MemberState.SERVING),
        ({"ready": False}, None),
        ({"ready": False, "serving": True, "terminating": True}, MemberState.DRAINING),
        ({"ready": False, "serving": False, "terminating": True}, None),
    ],
)
def test_the_conditions_of_a_pod_determine_its_member_state(conditions, state):
    found = members_of(slices(slice_of("x", pod("p-0", "10.1.0.1", **conditions))), "kv")
    assert [member.state for member in found] == ([] if state is None else [state])


def test_a_pod_becomes_a_member():
    found = members_of(slices(slice_of("x", pod("p-0", "10.1.0.1"))), "kv")
    assert found == (
        Member(id="p-0", address="tcp://10.1.0.1:7070", zone="zone-a", incarnation="uid-p-0"),
    )


def test_a_pod_with_a_host_name_has_its_dns_name_as_tls_name(api, account):
    api.put("a", stateful_pod("flash-0", "10.1.0.1"), pod("p-1", "10.1.0.2"))
    source, views = source_of(api, account), ReportedViews()
    source.watch(views)
    members = views.until(lambda members: len(members) == 2)
    source.close()
    assert {member.id: member.tls_name for member in members} == {
        "flash-0": "flash-0.flash.kv.svc",
        "p-1": "",
    }


@pytest.mark.parametrize(
    ("port", "numbers"), [("", [9090]), ("kv", [7070]), ("7070", [7070]), ("other", [])]
)
def test_the_port_is_picked_by_name_or_number(port, numbers):
    found = members_of(slices(slice_of("x", pod("p-0", "10.1.0.1"))), port)
    assert [m.address for m in found] == [f"tcp://10.1.0.1:{number}" for number in numbers]


def test_a_pod_in_several_slices_is_one_member_with_its_best_state():
    found = members_of(
        slices(
            slice_of("v6", pod("p-0", "fd00::1"), kind="IPv6"),
            slice_of("new", pod("p-0", "10.1.0.1"), pod("p-1", "10.1.0.2")),
            slice_of("old", pod("p-1", "10.1.0.9", serving=True, terminating=True)),
        ),
        "kv",
    )
    assert {m.id: (m.address, m.state) for m in found} == {
        "p-0": ("tcp://10.1.0.1:7070", MemberState.SERVING),
        "p-1": ("tcp://10.1.0.2:7070", MemberState.SERVING),
    }


def test_added_and_deleted_slices_change_the_members(api, account):
    api.put("one", pod("p-0", "10.1.0.1"))
    source, heard = source_of(api, account), ReportedViews()
    source.watch(heard)
    heard.until(lambda members: [m.id for m in members] == ["p-0"])
    api.put("two", pod("p-1", "10.1.0.2"))
    heard.until(lambda members: {m.id for m in members} == {"p-0", "p-1"})
    api.delete("one")
    heard.until(lambda members: [m.id for m in members] == ["p-1"])
    source.close()


def test_a_watch_goes_on_from_where_it_ended(api, account):
    api.put("one", pod("p-0", "10.1.0.1"))
    source, heard = source_of(api, account), ReportedViews()
    source.watch(heard)
    heard.until(lambda members: len(members) == 1)
    api.put("one", pod("p-0", "10.1.0.1"), pod("p-1", "10.1.0.2"))
    heard.until(lambda members: len(members) == 2)
    with api.changing:
        api.version += 50
        api.tell(
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(api.version)}}}
        )
        bookmark = str(api.version)
    api.end_watches()
    api.put("two", pod("p-2", "10.1.0.3"))
    heard.until(lambda members: len(members) == 3)
    source.close()
    lists = [query for _, query, _ in api.requests if "watch" not in query]
    versions = [query["resourceVersion"] for _, query, _ in api.requests if "watch" in query]
    assert len(lists) == 1
    assert versions[1] == bookmark


def test_a_watch_from_an_expired_version_lists_again_without_trouble(api, account, caplog):
    api.put("one", pod("p-0", "10.1.0.1"))
    source, heard = source_of(api, account), ReportedViews()
    source.watch(heard)
    heard.until(lambda members: len(members) == 1)
    api.oldest = api.version + 10
    api.end_watches()
    assert api.sent_back.wait(60)
    api.put("two", pod("p-1", "10.1.0.2"))
    heard.until(lambda members: len(members) == 2)
    source.close()
    assert not caplog.records


def test_a_renewed_token_is_used(api, account):
    (account / "token").write_text("token-0")
    source, heard = source_of(api, account), ReportedViews()
    api.put("one", pod("p-0", "10.1.0.1"))
    source.watch(heard)
    trouble = wait_for_trouble(source)
    assert "401" in trouble
    assert "allow list and watch of endpointslices" in trouble
    (account / "token").write_text(TOKEN)
    heard.until(lambda members: len(members) == 1)
    source.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"namespace_file": "/nowhere/namespace"}, "/nowhere/namespace"),
        ({"token_file": "/nowhere/token"}, "/nowhere/token"),
        ({"namespace": "other"}, "404: not found"),
        ({"server": "http://127.0.0.1:1"}, "http://127.0.0.1:1: "),
        ({"server": "https://127.0.0.1:1", "ca_file": "/nowhere/ca"}, "/nowhere/ca"),
    ],
)
def test_trouble_names_its_cause(api, account, fields, said):
    source = source_of(api, account, **fields)
    source.watch(ReportedViews())
    assert said in wait_for_trouble(source)
    source.close()


def test_an_unexpected_answer_is_reported_as_trouble(api, account):
    api.slices["bad"] = {"metadata": {"name": "bad"}, "endpoints": "none"}
    source = source_of(api, account)
    source.watch(ReportedViews())
    assert f"{api.url}: unexpected answer: Expected" in wait_for_trouble(source)
    source.close()


def test_a_server_that_is_not_a_url_is_refused():
    with pytest.raises(MembershipError, match=r"'10\.0\.0\.1:6443' is not a server"):
        KubernetesSource(KubernetesOptions(service="flash", server="10.0.0.1:6443"))


def test_the_servers_certificate_is_verified(api, account):
    api.put("one", pod("p-0", "10.1.0.1"))
    ours, other = Authority(account, "ours"), Authority(account, "other")
    issued = ours.issue("api")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.cert, issued.key)
    api.socket = context.wrap_socket(api.socket, server_side=True)
    secure = api.url.replace("http:", "https:")

    refusing = source_of(api, account, server=secure, ca_file=str(other.file))
    refusing.watch(ReportedViews())
    assert "certificate verify failed" in wait_for_trouble(refusing)
    refusing.close()

    source, heard = source_of(api, account, server=secure, ca_file=str(ours.file)), ReportedViews()
    source.watch(heard)
    heard.until(lambda members: len(members) == 1)
    source.close()
