"""The adapter behind LMCache's own factory, with LMCache's keys, memory objects and bitmaps."""

import contextlib
import hashlib
import logging
import random
import select

import numpy as np
import pytest

pytest.importorskip("lmcache")

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform.event_notifier import consume_fd

from holdfast.limits import MIB
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast_bench.harness.node import NodeUnderTest

SHAPE = torch.Size([2, 4, 256, 16])
NUMBERS = random.Random(1)


class Server:
    """What LMCache's server does with an adapter: submit a task, wait for its event, ask once."""

    def __init__(self, address, **params):
        config = PluginL2AdapterConfig(
            "holdfast.engines.lmcache",
            "HoldfastL2Adapter",
            {"holdfast": address, "identity": "e"} | params,
        )
        self.adapter = create_l2_adapter_from_registry(config)

    def store(self, keys, objects):
        task = self.adapter.submit_store_task(keys, objects)
        self.wait(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[task]

    def look_up(self, keys, layouts):
        task = self.adapter.submit_lookup_and_lock_task(keys, layouts)
        self.wait(self.adapter.get_lookup_and_lock_event_fd())
        return bits(self.adapter.query_lookup_and_lock_result(task), len(keys))

    def load(self, keys, objects):
        task = self.adapter.submit_load_task(keys, objects)
        self.wait(self.adapter.get_load_event_fd())
        return bits(self.adapter.query_load_result(task), len(keys))

    def wait(self, fd):
        assert select.select([fd], [], [], 60)[0]
        consume_fd(fd)


@contextlib.contextmanager
def arena(node):
    """Lend the memory of the one namespace that has blocks in a node."""
    with contextlib.closing(Client(node.address, m.Hello(m.PROTOCOL, "test"), 60.0)) as client:
        listing = client.call(m.List(), m.ReportReply, 60.0).data["blocks"]
    (namespace,) = [each for each in listing if each["blocks"]]
    fingerprint = bytes.fromhex(namespace["fingerprint"])
    sizes = namespace["raw_bytes"], namespace["block_tokens"]
    hello = m.Hello(m.PROTOCOL, "test", fingerprint, *sizes)
    with contextlib.closing(Client(node.address, hello, 60.0)) as client:
        yield client.arena.view


def bits(bitmap, count):
    return [bitmap.test(i) for i in range(count)]


def key_of(number, **changes):
    chunk = hashlib.blake2b(str(number).encode(), digest_size=32).digest()
    fields = {"chunk_hash": chunk, "model_name": "org/model", "kv_rank": 0x01000100}
    return ObjectKey(**(fields | changes))


def layout_of(shape=SHAPE, dtype=torch.float16):
    return MemoryLayoutDesc([shape], [dtype])


def object_of(shape=SHAPE, dtype=torch.float16, fill=True):
    nbytes = shape.numel() * dtype.itemsize
    data = NUMBERS.randbytes(nbytes) if fill else bytes(nbytes)
    raw = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    meta = MemoryObjMetadata(
        shape, dtype, 0, nbytes, 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[dtype]
    )
    return TensorMemoryObj(raw, meta, None)


def same(one, other):
    return bytes(one.byte_array) == bytes(other.byte_array)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with NodeUnderTest(tmp_path_factory.mktemp("n"), 64 * MIB, 64 * MIB) as one:
        yield one


@pytest.fixture
def opened(node):
    """Open servers of the node; they are closed at the end."""
    servers = []

    def one(**params):
        servers.append(Server(node.address, **params))
        return servers[-1]

    yield one
    for server in servers:
        server.adapter.close()


def test_a_task_whose_chunks_have_no_shape_ends_as_a_miss(opened, monkeypatch):
    keys, objects = [key_of(i) for i in range(2)], [object_of() for _ in range(2)]

    def fail():
        raise RuntimeError("freed")

    for each in objects:
        monkeypatch.setattr(each, "get_shapes", fail)
    server = opened()
    assert not server.store(keys, objects).is_successful()
    assert server.load(keys, objects) == [False, False]


def test_another_server_finds_and_loads_what_one_has_stored(opened):
    keys, saved = [key_of(i) for i in range(5)], [object_of() for _ in range(5)]
    result = opened().store(keys, saved)
    assert result.is_successful()
    assert result.bytes_transferred() == sum(each.get_size() for each in saved)
    server = opened()
    wanted = [keys[3], key_of("other"), keys[0]]
    assert server.look_up(wanted, {0: layout_of()}) == [True, False, True]
    into = [object_of(fill=False) for _ in wanted]
    assert server.load(wanted, into) == [True, False, True]
    assert same(into[0], saved[3])
    assert same(into[2], saved[0])


def test_chunks_of_several_object_groups_are_kept_in_one_task(opened):
    small = torch.Size([1, 64])
    keys = [key_of("g"), key_of("g", object_group_id=1)]
    saved = [object_of(), object_of(small, torch.float32)]
    assert opened().store(keys, saved).is_successful()
    server = opened()
    layouts = {0: layout_of(), 1: layout_of(small, torch.float32)}
    assert server.look_up(keys, layouts) == [True, True]
    into = [object_of(fill=False), object_of(small, torch.float32, fill=False)]
    assert server.load(keys, into) == [True, True]
    assert all(map(same, into, saved))


OTHERS = {
    "hash": lambda: (key_of("x2"), layout_of(), {}),
    "model": lambda: (key_of("x", model_name="other"), layout_of(), {}),
    "rank": lambda: (key_of("x", kv_rank=0x02000200), layout_of(), {}),
    "group": lambda: (key_of("x", object_group_id=1), layout_of(), {}),
    "salt": lambda: (key_of("x", cache_salt="tenant"), layout_of(), {}),
    "dtype": lambda: (key_of("x"), layout_of(dtype=torch.bfloat16), {}),
    "shape": lambda: (key_of("x"), layout_of(torch.Size([2, 4, 16, 256])), {}),
    "engines": lambda: (key_of("x"), layout_of(), {"identity": "other"}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_chunk_that_differs_in_one_field_is_not_found(opened, other):
    opened().store([key_of("x")], [object_of()])
    key, layout, params = OTHERS[other]()
    server = opened(**params)
    assert server.look_up([key], {0: layout, 1: layout}) == [False]
    into = object_of(layout.shapes[0], layout.dtypes[0], fill=False)
    assert server.load([key], [into]) == [False]
    assert not any(bytes(into.byte_array))


def test_short_hashes_are_refused_with_the_remedy(opened, caplog):
    server, short = opened(), key_of("s", chunk_hash=bytes(8))
    with caplog.at_level(logging.WARNING, "lmcache.holdfast"):
        assert not server.store([short], [object_of()]).is_successful()
        assert server.look_up([short], {0: layout_of()}) == [False]
    assert caplog.text.count("--hash-algorithm blake3 or sha256_cbor") == 1


def test_a_damaged_chunk_is_a_miss(opened, node):
    node.drop_all()
    keys, saved = [key_of(f"d{i}") for i in range(3)], [object_of() for _ in range(3)]
    server = opened()
    server.store(keys, saved)
    with arena(node) as memory:
        at = bytes(memory).find(bytes(saved[1].byte_array)[:64])
        memory[at + 1000] ^= 1
    into = [object_of(fill=False) for _ in keys]
    assert server.load(keys, into) == [True, False, True]
    assert same(into[0], saved[0])


def test_a_node_that_is_gone_is_a_miss_of_every_task(tmp_path):
    with NodeUnderTest(tmp_path / "n", 64 * MIB, 64 * MIB) as gone:
        server = Server(gone.address)
        server.store([key_of(1)], [object_of()])
        gone.kill()
        assert server.look_up([key_of(1)], {0: layout_of()}) == [False]
        assert server.load([key_of(1)], [object_of()]) == [False]
        assert not server.store([key_of(2)], [object_of()]).is_successful()
        server.adapter.close()
