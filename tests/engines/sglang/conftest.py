"""The storage backend over stubs of SGLang and a real node."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import sglang_stubs

from holdfast.limits import MIB
from holdfast_bench.harness import model
from holdfast_bench.harness.node import NodeUnderTest

BINDING = "holdfast.engines.sglang"


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with NodeUnderTest(tmp_path_factory.mktemp("n"), 64 * MIB, 64 * MIB) as one:
        yield one


@pytest.fixture
def sglang(monkeypatch, node, tmp_path):
    """A server with SGLang's stubs: `storage` attaches a storage to a host pool of its."""
    for name in [name for name in sys.modules if name.startswith((BINDING, "sglang."))]:
        monkeypatch.delitem(sys.modules, name)
    opened = []

    def storage(pool=None, arguments=None, config=None, **extra):
        given = {
            **sglang_stubs.ARGUMENTS,
            "model_path": str(model.make("tiny")),
            **(arguments or {}),
        }
        facts = {
            key: extra.pop(key) for key in ("version", "multimodal", "tree_core") if key in extra
        }
        for name, module in sglang_stubs.installed(given, **facts).items():
            monkeypatch.setitem(sys.modules, name, module)
        binding = importlib.import_module(BINDING)
        named = {
            "backend_name": "holdfast",
            "module_path": BINDING,
            "class_name": "HoldfastStorage",
        }
        described = sglang_stubs.HiCacheStorageConfig(
            **(config or {}),
            extra_config={
                **named,
                "interface_v1": 1,
                "holdfast": node.address,
                "model_digest": str(tmp_path),  # each test has pages of its own
                **extra,
            },
        )
        one = binding.HoldfastStorage(described, {})
        one.register_mem_pool_host(sglang_stubs.HostPool() if pool is None else pool)
        opened.append(one)
        return one

    yield SimpleNamespace(storage=storage)
    for one in opened:
        one.close()
