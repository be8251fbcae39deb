"""The parts of SGLang that the binding uses, as stubs: for Python without SGLang.

Their parameters and fields are those that `holdfast.engines.sglang.interface` records; a test with
the real SGLang compares the record.
"""

import enum
import functools
import hashlib
import importlib.machinery
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

ARGUMENTS = {
    "model_path": "",
    "revision": None,
    "load_format": "auto",
    "dtype": "float32",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "quantization_param_path": None,
    "json_model_override_args": "{}",
    "trust_remote_code": False,
    "attention_backend": "torch_native",
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
    "lora_paths": None,
    "device": "cpu",
    "page_size": 4,
}

CHOSEN = ("attention_backend", "device")
"""Arguments that SGLang chooses if the command line does not name them."""


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        pass

    def on_host_pools_registered(self):
        pass

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None): ...

    def batch_get_v2(self, transfers, extra_info=None): ...

    def batch_set_v2(self, transfers, extra_info=None): ...

    def batch_exists(self, keys, extra_info=None): ...

    def batch_get_v1(self, keys, host_indices, extra_info=None): ...

    def batch_set_v1(self, keys, host_indices, extra_info=None): ...

    def exists(self, key): ...

    def get(self, key, target_location=None, target_sizes=None): ...

    def batch_get(self, keys, target_locations=None, target_sizes=None): ...

    def set(self, key, value=None, target_location=None, target_sizes=None): ...

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...

    def clear(self): ...


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    dcp_rank: int = 0
    dcp_size: int = 1
    logical_page_size: int | None = None
    extra_config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_storage_writer(self):
        return not self.is_mla_model or self.tp_rank == 0


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None


class PoolHitPolicy(enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class WeightUpdater:
    def update_weights_from_disk(
        self, model_path, load_format, weight_name_filter=None, recapture_cuda_graph=False
    ): ...

    def load_weights_from_distributed(self, named_tensors): ...

    def update_weights_from_tensor(self, named_tensors, load_format=None): ...

    def update_weights_from_ipc(self, recv_req): ...


class RuntimeContext:
    """The arguments in effect: what SGLang chose for those of the command line that are None."""

    def __init__(self, leaves):
        self.leaves = leaves

    def config_leaf(self, name):
        if name not in self.leaves:
            raise ValueError(f"{name!r} is not a config leaf (no namespace)")
        return self.leaves[name]


class HookType(enum.Enum):
    BEFORE = "before"
    AROUND = "around"


def get_hash_str(token_ids, prior_hash=None, page_size=None):
    """Name pages by a chain of hashes, as SGLang does."""
    names, prior = [], bytes.fromhex(prior_hash or "")
    for first in range(0, len(token_ids), page_size or len(token_ids)):
        page = token_ids[first : first + (page_size or len(token_ids))]
        prior = hashlib.sha256(prior + str(list(page)).encode()).digest()
        names.append(prior.hex())
    return names if page_size else names[-1]


class SglangUtils(SimpleNamespace):
    """The module of SGLang that names pages; a hook replaces its function."""


UTILS = SglangUtils(get_hash_str=get_hash_str)


class HookRegistry:
    """Puts hooks before methods of `WeightUpdater`, as SGLang's does."""

    hooks: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, target, hook, hook_type, *, source=None):
        cls.hooks[target.rpartition(".")[2]] = hook

    @classmethod
    def apply_hooks(cls):
        for method, hook in cls.hooks.items():
            if method == "get_hash_str":
                UTILS.get_hash_str = functools.partial(hook, get_hash_str)
            else:
                setattr(WeightUpdater, method, _hooked(getattr(WeightUpdater, method), hook))
        cls.hooks.clear()


def _hooked(method, hook):
    @functools.wraps(method)
    def hooked(*args, **kwargs):
        hook(*args, **kwargs)
        return method(*args, **kwargs)

    return hooked


class HostPool:
    """A host pool of SGLang's layout page_first_direct: keys of all pages, then values."""

    layout = "page_first_direct"
    page_size, layer_num, head_num, head_dim = 4, 2, 2, 4
    start_layer, end_layer = 0, 2

    def __init__(self, pages=16, dtype=torch.float32):
        self.dtype, self.size = dtype, pages * self.page_size
        shape = (2, pages, self.layer_num, self.page_size, self.head_num, self.head_dim)
        self.kv_buffer = torch.zeros(shape, dtype=dtype)

    @property
    def k_buffer(self):
        return self.kv_buffer[0]

    @property
    def v_buffer(self):
        return self.kv_buffer[1]

    def fill(self, seed):
        drawn = torch.randn(self.kv_buffer.shape, generator=torch.Generator().manual_seed(seed))
        self.kv_buffer.copy_(drawn)
        return self

    def get_page_buffer_meta(self, indices):
        pages = [int(index) // self.page_size for index in indices[:: self.page_size]]
        parts = [self.kv_buffer[which, page] for page in pages for which in (0, 1)]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]

    def get_data_page(self, index, flat=True):
        return self.kv_buffer[:, int(index) // self.page_size].flatten()

    def set_from_flat_data_page(self, index, data_page):
        page = self.kv_buffer[:, int(index) // self.page_size]
        page.copy_(data_page.view(page.shape))


class MLATokenToKVPoolHost(HostPool):
    """A pool of which all ranks hold copies."""


class FlatHostPool(HostPool):
    """A pool without addresses of pages."""

    def get_page_buffer_meta(self, indices):
        raise ValueError("Unsupported layout: other")


def hashes(count, seed="a"):
    """Return SGLang's names of pages: hexadecimal SHA-256."""
    return [hashlib.sha256(f"{seed}{i}".encode()).hexdigest() for i in range(count)]


def indices(pages, page_size=4):
    """Return the host indices of the tokens of these pages."""
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def installed(arguments, *, version="0.5.23", multimodal=False, tree_core="python"):
    """Return stubs by the names of modules, for a server with these arguments in effect."""
    model_config = SimpleNamespace(
        ModelConfig=SimpleNamespace(
            from_server_args=lambda _: SimpleNamespace(is_multimodal=multimodal)
        )
    )
    here = sys.modules[__name__]
    contents = {
        "sglang": SimpleNamespace(__version__=version),
        "sglang.srt.mem_cache.hicache_storage": here,
        "sglang.srt.mem_cache.utils": UTILS,
        "sglang.srt.plugins.hook_registry": here,
        "sglang.srt.model_executor.model_runner_components.weight_updater": here,
        "sglang.srt.runtime_context": SimpleNamespace(
            RuntimeContext=RuntimeContext,
            get_context=lambda: RuntimeContext(arguments),
            get_server_args=lambda: SimpleNamespace(**arguments | dict.fromkeys(CHOSEN)),
        ),
        "sglang.srt.configs.model_config": model_config,
        "sglang.srt.environ": SimpleNamespace(
            envs=SimpleNamespace(
                SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=SimpleNamespace(get=lambda: tree_core)
            )
        ),
    }
    modules = {}
    for name, content in contents.items():
        steps = name.split(".")
        for end in range(1, len(steps) + 1):
            path = ".".join(steps[:end])
            if path not in modules:
                modules[path] = ModuleType(path)
                modules[path].__path__ = []
                modules[path].__spec__ = importlib.machinery.ModuleSpec(path, None)
        vars(modules[name]).update(
            {key: value for key, value in vars(content).items() if not key.startswith("__")}
        )
        if name == "sglang":
            modules[name].__version__ = version
    return modules
