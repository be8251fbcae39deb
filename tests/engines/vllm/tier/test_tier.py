"""The tier behind vLLM's own manager, factory and shared memory, without an engine."""

import logging
import random
import time
import uuid
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from holdfast.engines.vllm.tier import HoldfastTier
from holdfast.errors import ConfigError
from holdfast.limits import MIB
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

ROW = 64 * 1024
PAGE = 128
STEP = ScheduleEndContext((), ())
NUMBERS = random.Random(1)


class Settings(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))


def model_of(**changes):
    """What vLLM's configuration says of a model."""
    settings = Settings(rope_theta=10_000.0, hidden_size=64)
    fields = {
        "hf_config": settings,
        "hf_text_config": settings,
        "dtype": "torch.float32",
        "quantization": None,
        "disable_sliding_window": False,
        "max_model_len": 4096,
        "get_total_num_hidden_layers": lambda: 2,
        "multimodal_config": None,
    }
    return SimpleNamespace(**(fields | changes))


def drafting(**changes):
    """What vLLM's configuration says of an engine with an EAGLE head."""
    speculative = SimpleNamespace(method="eagle", draft_model_config=model_of(**changes))
    return engine_of(speculative_config=speculative)


def with_images(**changes):
    """What vLLM's configuration says of an engine whose model takes images."""
    options = {"language_model_only": False, "enable_mm_embeds": False}
    return engine_of(model_of(multimodal_config=SimpleNamespace(**(options | changes))))


def engine_of(model=None, **changes):
    """What vLLM's configuration says of an engine."""
    cache = {"prefix_caching_hash_algo": "sha256", "cache_dtype": "auto"}
    fields = {
        "model_config": model or model_of(),
        "cache_config": SimpleNamespace(**(cache | changes.pop("cache", {}))),
        "device_config": SimpleNamespace(device_type="cpu"),
        "lora_config": None,
        "load_config": None,  # model_digest is set
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "num_prefill_lookahead_tokens": 1,
        "speculative_config": None,
        "attention_config": "default",
    }
    return SimpleNamespace(**(fields | changes))


def offloading_of(address, **changes):
    """What vLLM hands to a spec: two groups whose rows are alike."""
    tier = {"type": "HoldfastTier", "module_path": "holdfast.engines.vllm.tier"}
    tier |= {"holdfast": address, "model_digest": "m"} | changes.pop("options", {})
    fields = {
        "groups": tuple(OffloadingGroupConfig(PAGE, (f"layer{g}",), g) for g in range(2)),
        "worker_kv_bytes_per_block": ROW,
        "enable_kv_cache_events": False,
        "extra_config": {"cpu_bytes_to_use": 2 * MIB, "secondary_tiers": [tier]},
        "engine_id": str(uuid.uuid4()),
        "model": OffloadingModelConfig("m", "float32"),
        "cache": OffloadingCacheConfig(PAGE, 1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**(fields | changes))


class Engine:
    """The scheduler's side of an engine that offloads rows."""

    def __init__(self, offloading, vllm_config=None):
        vllm_config = vllm_config or engine_of()  # where the tier looks for it
        self.manager = TieringOffloadingSpec(offloading).get_manager()
        assert vllm_config is not None
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self.requests = 0

    @property
    def tier(self):
        (tier,) = self.manager.secondary_tiers
        return tier

    def request(self, keys=()):
        self.requests += 1
        context = ReqContext(f"r{self.requests}")
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, (number + 1) * PAGE)
        self.manager.on_new_request(context)
        return context

    def save(self, blocks):
        """Store rows as a finished request does; return once the tier has ended the job."""
        context = self.request(blocks)
        output = self.manager.prepare_store(list(blocks), context)
        chunks = output.store_spec.chunk_ids
        for key, chunk in zip(output.keys_to_store, chunks, strict=True):
            self.rows[chunk].view(np.uint8)[:] = blocks[key]
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.idle()

    def idle(self):
        end_s = time.monotonic() + 60
        while self.manager.has_pending_work():
            assert time.monotonic() < end_s
            self.manager.on_schedule_end(STEP)
            time.sleep(0.001)

    def load(self, keys):
        """Ask for rows until nothing is pending; return the rows that can be read."""
        context, end_s = self.request(), time.monotonic() + 60
        while time.monotonic() < end_s:
            found = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING}.intersection(found):
                break
            self.manager.on_schedule_end(STEP)
            time.sleep(0.001)
        held = [key for key, said in zip(keys, found, strict=True) if said is LookupResult.HIT]
        chunks = self.manager.prepare_load(held, context).chunk_ids if held else []
        rows = [self.rows[chunk].view(np.uint8).copy() for chunk in chunks]
        self.manager.complete_load(held, context)
        self.manager.on_request_finished(context)
        return dict(zip(held, rows, strict=True))

    def close(self):
        self.rows = None
        self.manager.shutdown()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with NodeUnderTest(tmp_path_factory.mktemp("n"), 64 * MIB, 64 * MIB) as one:
        yield one


@pytest.fixture
def opened(node):
    """Open engines of the node; they are closed at the end."""
    engines = []

    def one(vllm_config=None, **changes):
        engines.append(Engine(offloading_of(node.address, **changes), vllm_config))
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()


def blocks_of(count, groups=2):
    """New rows of each KV group, by key."""
    return {
        make_offload_key(NUMBERS.randbytes(32), group): np.frombuffer(
            NUMBERS.randbytes(ROW), np.uint8
        )
        for group in range(groups)
        for _ in range(count)
    }


def test_another_engine_loads_the_rows_of_every_group_in_any_order(opened):
    saved = blocks_of(6)
    opened().save(saved)
    keys = list(saved)
    random.Random(2).shuffle(keys)
    loaded = opened().load([*keys, make_offload_key(bytes(32), 0)])
    assert loaded.keys() == saved.keys()
    assert all((loaded[key] == saved[key]).all() for key in keys)


def test_rows_that_left_the_host_memory_of_vllm_come_back(opened):
    engine, first = opened(), blocks_of(4)
    engine.save(first)
    for _ in range(6):
        engine.save(blocks_of(4))
    loaded = engine.load(list(first))
    assert loaded.keys() == first.keys()
    assert all((loaded[key] == first[key]).all() for key in first)


def test_a_damaged_row_is_a_miss_and_the_others_are_loaded(opened, node, real):
    engine, saved = opened(), blocks_of(4, groups=1)
    engine.save(saved)
    damaged = list(saved)[1]
    node.drop_all()
    fresh = opened()
    fresh.save(saved)
    with real.arena(node) as memory:
        at = bytes(memory).find(saved[damaged][:64].tobytes())
        memory[at + 100] ^= 1
    loaded = opened().load(list(saved))
    assert loaded.keys() == saved.keys() - {damaged}
    assert all((loaded[key] == saved[key]).all() for key in loaded)


def test_a_reset_waits_for_the_transfers_in_progress(opened):
    engine, saved = opened(), blocks_of(8)
    context = engine.request(saved)
    output = engine.manager.prepare_store(list(saved), context)
    for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
        engine.rows[chunk].view(np.uint8)[:] = saved[key]
    engine.manager.complete_store(output.keys_to_store, context)
    engine.manager.on_request_finished(context)
    engine.manager.reset_cache()
    engine.rows[:] = 0
    loaded = opened().load(list(saved))
    assert loaded.keys() == saved.keys()
    assert all((loaded[key] == saved[key]).all() for key in saved)


def test_after_a_reset_an_engine_shares_no_block_because_its_weights_may_have_changed(opened):
    engine, before, after = opened(), blocks_of(2), blocks_of(2)
    engine.save(before)
    engine.manager.reset_cache()
    # vLLM 0.33 loads nothing before its workers have ended what they were doing.
    getattr(engine.manager, "on_reset_flushed", lambda: None)()
    assert not engine.load(list(before))
    engine.save(after)
    assert not opened().load(list(after))
    for _ in range(6):
        engine.save(blocks_of(4))
    assert engine.load(list(after)).keys() == after.keys()


OTHERS = {
    "rope": lambda: (engine_of(model_of(hf_text_config=Settings(rope_theta=5.0))), {}),
    "settings": lambda: (engine_of(model_of(hf_config=Settings(hidden_size=32))), {}),
    "quantised weights": lambda: (engine_of(model_of(quantization="fp8")), {}),
    "KV dtype": lambda: (engine_of(cache={"cache_dtype": "fp8"}), {}),
    "hash": lambda: (engine_of(cache={"prefix_caching_hash_algo": "sha256_cbor"}), {}),
    "attention": lambda: (engine_of(attention_config="other"), {}),
    "draft model": lambda: (drafting(), {}),
    "weights": lambda: (None, {"options": {"model_digest": "other"}}),
    "dtype": lambda: (None, {"model": OffloadingModelConfig("m", "float16")}),
    "layout": lambda: (None, {"kv_cache_layout": "LBNHC"}),
    "ranks": lambda: (
        None,
        {"parallel": OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, False)},
    ),
    "layers": lambda: (
        None,
        {"groups": tuple(OffloadingGroupConfig(PAGE, (f"other{g}",), g) for g in range(2))},
    ),
    "page": lambda: (
        None,
        {"groups": tuple(OffloadingGroupConfig(2 * PAGE, (f"layer{g}",), g) for g in range(2))},
    ),
    "chunk": lambda: (None, {"cache": OffloadingCacheConfig(PAGE, 2)}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_engine_that_differs_in_one_field_finds_nothing(opened, other):
    saved = blocks_of(1)
    opened().save(saved)
    vllm_config, changes = OTHERS[other]()
    assert not opened(vllm_config, **changes).load(list(saved))


def canonical(ranks):
    """What vLLM hands over with `canonical_layout`: a row has the heads of all ranks."""
    parallel = OffloadingParallelConfig(0, ranks, ranks, 1, 1, 1, 0, 1, None, True)
    worker = {"worker_kv_bytes_per_block": ROW // ranks}
    return {"canonical_layout": True, "parallel": parallel} | worker


def test_canonical_rows_are_found_at_another_tensor_parallel_size(opened):
    saved = blocks_of(2)
    opened(**canonical(1)).save(saved)
    loaded = opened(**canonical(2)).load(list(saved))
    assert loaded.keys() == saved.keys()
    assert all((loaded[key] == saved[key]).all() for key in saved)
    assert not opened().load(list(saved))


def test_two_drafts_share_no_row(opened):
    saved = blocks_of(2)
    opened(drafting()).save(saved)
    assert not opened(drafting(hf_config=Settings(hidden_size=32))).load(list(saved))
    assert opened(drafting()).load(list(saved)).keys() == saved.keys()


def test_a_node_that_is_gone_is_a_miss_and_ends_every_job(tmp_path):
    with NodeUnderTest(tmp_path / "n", 64 * MIB, 64 * MIB) as gone:
        engine, saved = Engine(offloading_of(gone.address)), blocks_of(2)
        engine.save(saved)
        gone.kill()
        engine.save(blocks_of(2))
        engine.manager.reset_cache()
        assert not engine.load(list(saved))
        engine.close()


@pytest.mark.parametrize(
    ("vllm_config", "why"),
    [
        (engine_of(cache={"prefix_caching_hash_algo": "xxhash"}), "xxhash may collide"),
        (engine_of(lora_config="some"), "set fixed_adapters to true"),
        (with_images(), "set fixed_uuids to true"),
        (with_images(language_model_only=True, enable_mm_embeds=True), "fixed_uuids"),
        (engine_of(speculative_config=SimpleNamespace(method="dflash")), "'dflash' keeps KV"),
        (engine_of(cache={"calculate_kv_scales": True}), "differ between runs"),
    ],
)
def test_an_engine_whose_rows_are_not_named_by_their_content_saves_none(
    opened, caplog, vllm_config, why
):
    with caplog.at_level(logging.WARNING, "vllm.holdfast"):
        engine = opened(vllm_config)
    assert why in caplog.text
    saved = blocks_of(1)
    engine.save(saved)
    engine.manager.reset_cache()
    assert not engine.load(list(saved))


def test_adapters_whose_files_never_change_are_allowed(opened):
    saved = blocks_of(1)
    settings = {"options": {"fixed_adapters": True}}
    opened(engine_of(lora_config="some"), **settings).save(saved)
    assert (
        opened(engine_of(lora_config="some"), **settings).load(list(saved)).keys() == saved.keys()
    )


@pytest.mark.parametrize(
    ("options", "language_model_only"),
    [({"fixed_uuids": True}, False), ({}, True)],
    ids=["names that never change", "no images"],
)
def test_an_engine_whose_images_have_one_content_each_is_allowed(
    opened, options, language_model_only
):
    saved = blocks_of(1)
    for _ in range(2):
        engine = opened(with_images(language_model_only=language_model_only), options=options)
        if not engine.load(list(saved)):
            engine.save(saved)
    assert engine.load(list(saved)).keys() == saved.keys()


def test_an_unknown_option_is_refused_by_its_name(opened):
    with pytest.raises(ConfigError, match=r"secondary_tiers: disk is unknown; known are holdfast"):
        opened(options={"disk": "1 GiB"})
    with pytest.raises(ConfigError, match=r"secondary_tiers.domain is empty"):
        opened(options={"domain": ""})
    for name in ("fixed_adapters", "fixed_uuids"):
        with pytest.raises(ConfigError, match=f"{name} is 'yes'; write true or false"):
            opened(options={name: "yes"})


def test_the_tier_reports_its_hits_as_those_of_a_disk():
    assert HoldfastTier.medium is Medium.STORAGE
