"""A node's client and vLLM's objects, played in memory."""

import contextlib
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import struct
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.blocks.key import Chain
from holdfast.client.timeouts import EngineClocks
from holdfast.errors import NodeGoneError
from holdfast.testing.played_client import DOMAIN_KEY, PlayedClient, PlayedConnection
from holdfast.wire.frame import RECEIVE_BYTES, encode, request_reader
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import (
    PROTOCOL,
    Cover,
    Covered,
    Done,
    Hello,
    Hinted,
    List,
    Observed,
    Prestage,
    ReportReply,
)

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # On a busy machine, two threads wait for each other most of the time: the tests take twice as
    # long.
    "OMP_NUM_THREADS": "1",
}
"""What real engines are told before they import vLLM."""


def pytest_configure():
    """Import vLLM once, here: it warns while it does, and warnings are errors in tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import vllm.distributed.kv_transfer.kv_connector.v1.base  # noqa: F401
        except ImportError:
            return


class FakeReporter:
    """Tells at once."""

    def __init__(self, links):
        self.links = links

    def put(self, report):
        for link in self.links:
            client = link.client()
            if client is not None:
                with contextlib.suppress(NodeGoneError):
                    client.forget(client.send(report))

    def close(self):
        pass


class FakeRequest(SimpleNamespace):
    def __init__(self, request_id="r", tokens=(), **other):
        fields = {
            "request_id": request_id,
            "all_token_ids": list(tokens),
            "prompt_token_ids": list(tokens),
            "prompt_embeds": None,
            "mm_features": [],
            "lora_request": None,
            "resumable": False,
            "cache_salt": None,
            "skip_reading_prefix_cache": False,
            "sampling_params": None,
            "trace_headers": None,
            "num_preemptions": 0,
            "num_computed_tokens": 0,
        }
        super().__init__(**(fields | other))

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


def step(pages_of, **scheduled):
    """Return what vLLM's scheduler hands over: tokens scheduled, and pages, by request."""
    state = SimpleNamespace(get_block_ids=lambda name: (pages_of[name],))
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        kv_connector_block_state=state,
    )


def outcome(ended=(), invalid=(), said=None, failed=()):
    """Return what vLLM's workers report at the end of a step."""
    return SimpleNamespace(
        finished_recving=set(ended),
        invalid_block_ids=set(invalid),
        failed_recving=set(failed),
        kv_connector_worker_meta=said,
    )


BLOCK = 8
FINGERPRINT = b"f" * 16


def words(count, start=0):
    return list(range(start, start + count))


def setting(**changes):
    """What a connector with no options is told; its module imports vLLM."""
    from holdfast.engines.vllm.options import ConnectorSettings

    return ConnectorSettings("", "default", 0, "", 0.05, 5.0, saves=True)._replace(**changes)


class SchedulerRig:
    """A scheduler side with a node that holds `held` blocks of whatever it is asked about."""

    def __init__(self, fakes, page=BLOCK, ranks=1, setting=None, ledger=None, **group):
        # These import vLLM, which not every environment has.
        from holdfast.engines.vllm.scheduler import SchedulerSide
        from holdfast.engines.vllm.work import GroupHandshake, Handshake

        self.now = 0.0
        self.held = 0
        self.worth = None
        self.tier = "host"
        self.answering = True
        self.clients = [fakes.Client(self.answer) for _ in range(ranks)]
        self.links = [fakes.Link(client) for client in self.clients]
        namespaces = [
            Handshake((GroupHandshake(FINGERPRINT[:-1] + bytes([rank]), 64, BLOCK, page, **group),))
            for rank in range(ranks)
        ]
        reporter = FakeReporter(self.links)
        self.side = SchedulerSide(
            self.links,
            namespaces,
            setting or fakes.setting(),
            reporter,
            EngineClocks(*[lambda: self.now] * 2),
            ledger,
        )
        self.fakes = fakes

    @property
    def client(self):
        return self.clients[0]

    def answer(self, message):
        if isinstance(message, Observed):
            return Done()
        if isinstance(message, Prestage):
            return Hinted(len(message.keys) // 16)
        assert isinstance(message, Cover)
        if not self.answering:
            return None
        blocks = min(self.held, len(message.keys) // 16)
        return Covered(blocks, blocks if self.worth is None else self.worth, {self.tier: blocks})

    def request(self, count, **other):
        request = self.fakes.Request(tokens=words(count), **other)
        self.side.on_new_request(request)
        return request

    def chain(self, count, extras=None, domain_key=None):
        domain_key = domain_key or self.fakes.domain_key
        chain = Chain(domain_key, FINGERPRINT[:-1] + b"\0", BLOCK, {0: extras or []})
        chain.extend(words(count))
        return chain

    def run(self, request, scheduled, pages):
        work = self.side.build_work(
            self.fakes.step({request.request_id: pages}, **{request.request_id: scheduled})
        )
        request.num_computed_tokens += scheduled
        return work


@pytest.fixture(scope="session")
def fakes():
    return SimpleNamespace(
        Client=PlayedClient,
        Link=PlayedConnection,
        Teller=FakeReporter,
        Request=FakeRequest,
        step=step,
        outcome=outcome,
        domain_key=DOMAIN_KEY,
        SchedulerRig=SchedulerRig,
        setting=setting,
    )


@pytest.fixture(scope="session")
def real():
    return SimpleNamespace(Engine=Engine, Between=Between, arena=arena, forks=forks)


@pytest.fixture
def shared_memory():
    """Remove the shared memory that vLLM's ranks leave behind when they are stopped."""
    before = set(Path("/dev/shm").glob("vllm_dist_*"))
    yield
    for left in set(Path("/dev/shm").glob("vllm_dist_*")) - before:
        left.unlink(missing_ok=True)


class Engine:
    """A real vLLM in a process of its own; calls go to the methods of `vllm_driver.Driver`."""

    def __init__(self, log, **options):
        import vllm_driver

        self.log = log
        self._channel, its_end = multiprocessing.Pipe()
        its = (its_end, log, options)
        self.process = forks().Process(target=vllm_driver.run, args=its, daemon=True)
        self.process.start()
        its_end.close()

    def wait_ready(self):
        assert self._hear() == "ready"
        return self

    def __getattr__(self, name):
        def call(**arguments):
            self._channel.send((name, arguments))
            return self._hear()

        return call

    def _hear(self):
        try:
            return self._channel.recv()
        except EOFError:
            pytest.fail(f"the engine ended; the end of {self.log}:\n{self.log.read_text()[-3000:]}")

    def close(self):
        """Let the engine end by itself, which is part of what is tested."""
        self._channel.close()
        self.process.join(60)
        assert self.process.exitcode == 0, self.log.read_text()[-3000:]


@functools.cache
def forks():
    """Engines are forked from a process that has imported vLLM, which takes ten seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "holdfast.engines.vllm.connector"]
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def arena(node):
    """Lend the memory that engines and a node share, of the one namespace that has blocks there."""
    with contextlib.closing(Client(node.address, Hello(PROTOCOL, "test"), 60.0)) as client:
        listing = client.call(List(), ReportReply, 60.0).data["blocks"]
    (namespace,) = [each for each in listing if each["blocks"]]
    fingerprint = bytes.fromhex(namespace["fingerprint"])
    hello = Hello(PROTOCOL, "test", fingerprint, namespace["raw_bytes"], namespace["block_tokens"])
    with contextlib.closing(Client(node.address, hello, 60.0)) as client:
        yield client.arena.view


class Between:
    """Stands between engines and a node; `passes` sees every request and may swallow it.

    `sender.pid`: while `passes` is called, the process whose request it sees.
    """

    def __init__(self, node_path, path):
        self.address = f"unix://{path}"
        self.node_path = node_path
        self.passes = None
        self.sender = threading.local()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            engine, _ = self._listener.accept()
            node = socket.socket(socket.AF_UNIX)
            try:
                node.connect(self.node_path)
            except OSError:
                engine.close()
                node.close()
                continue
            for run in (self._requests, self._replies):
                threading.Thread(target=run, args=(engine, node), daemon=True).start()

    def _requests(self, engine, node):
        reader = request_reader()
        peer = engine.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.sender.pid, *_ = struct.unpack("3i", peer)
        with engine, node, contextlib.suppress(OSError):
            while data := engine.recv(RECEIVE_BYTES):
                reader.feed(data)
                while frame := reader.next():
                    if self.passes is None or self.passes(frame.message):
                        node.sendall(encode(frame.request_id, frame.message))
            node.shutdown(socket.SHUT_RDWR)

    def _replies(self, engine, node):
        with contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(node, 65536, 1)
                if not data:
                    break
                socket.send_fds(engine, [data], descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
        with contextlib.suppress(OSError):
            engine.shutdown(socket.SHUT_RDWR)
