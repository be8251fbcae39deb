"""A real etcd, run by the tests."""

import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from holdfast.probe import free_port
from holdfast.wire.remote.credentials import client_context
from holdfast_bench.harness.certificates import Authority
from holdfast_bench.harness.process import ChildProcess, wait_until


class EtcdServer:
    """One real etcd on the loopback interface, that can be stopped and started again."""

    def __init__(self, program, folder, tls=None):
        self._tls = tls
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{free_port()}"
        peer = f"http://127.0.0.1:{free_port()}"
        self._argv = [program, "--data-dir", str(folder / "data"), "--logger", "zap"]
        self._argv += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        self._argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._argv += ["--initial-cluster", f"default={peer}"]
        if tls:
            self._argv += ["--cert-file", tls.cert, "--key-file", tls.key]
            self._argv += ["--trusted-ca-file", tls.ca, "--client-cert-auth"]
        self._log = folder / "etcd.log"
        self.process = None
        self.start()

    def start(self):
        """Start it, if it does not run, and wait until it serves."""
        if self.process is None:
            self.process = ChildProcess("etcd", self._argv, self._log, {})
            wait_until(self.process, self._healthy, 60)

    def stop(self):
        """Stop it; what it knows is kept for the next start."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _healthy(self):
        context = client_context(self._tls) if self._tls else None
        try:
            health = f"{self.url}/health"
            with urllib.request.urlopen(health, timeout=2, context=context) as answer:
                return b"true" in answer.read()
        except (OSError, urllib.error.URLError):
            return False


@pytest.fixture(scope="session")
def etcd_server(find_program):
    """The session's etcd; a test that stops it starts it again."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-etcd-"))
    server = EtcdServer(find_program("etcd-server", "etcd"), folder)
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
def sealed_etcd(tmp_path, find_program):
    """An etcd that lets in only whom its authority vouches for, and what `members` says of it."""
    authority = Authority(tmp_path)
    server = EtcdServer(find_program("etcd-server", "etcd"), tmp_path, authority.issue("etcd"))
    ours = authority.issue("us")
    place = server.url.removeprefix("https://")
    yield server, f"etcd://{place}/pool", f"?ca={ours.ca}&cert={ours.cert}&key={ours.key}"
    server.stop()


@pytest.fixture
def etcd_url(etcd_server):
    """Where a running etcd is."""
    etcd_server.start()
    return etcd_server.url
