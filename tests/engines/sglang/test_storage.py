"""SGLang's storage interface over a node: v0, v1 and v2."""

import pytest
import torch
from sglang_stubs import (
    FlatHostPool,
    HiCacheStorageExtraInfo,
    HostPool,
    MLATokenToKVPoolHost,
    PoolHitPolicy,
    PoolTransfer,
    WeightUpdater,
    hashes,
    indices,
)


def page(pool, number):
    return pool.kv_buffer[:, number]


def test_pages_that_are_saved_are_found_and_read_in_place(sglang):
    saved, other = HostPool().fill(1), HostPool()
    writer, reader = sglang.storage(saved), sglang.storage(other)
    keys = hashes(4)
    assert writer.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys[:3], indices([5, 0, 9])) == [True] * 3
    assert reader.batch_exists(keys) == 3
    assert reader.batch_get_v1(keys, indices([1, 2, 3, 4])) == [True, True, True, False]
    for here, there in ((1, 5), (2, 0), (3, 9)):
        assert page(other, here).equal(page(saved, there))
    assert not page(other, 4).any()


def test_the_leading_run_of_pages_counts(sglang):
    storage, keys = sglang.storage(HostPool().fill(1)), hashes(4)
    storage.batch_set_v1([keys[0], keys[2]], indices([0, 2]))
    assert storage.batch_exists(keys) == 1
    assert [storage.exists(key) for key in keys] == [True, False, True, False]


def test_a_pool_without_addresses_of_pages_is_copied_by_its_own_methods(sglang):
    saved, other = FlatHostPool().fill(2), FlatHostPool()
    keys = hashes(2)
    assert sglang.storage(saved).batch_set_v1(keys, indices([3, 1])) == [True, True]
    assert sglang.storage(other).batch_get_v1(keys, indices([0, 2])) == [True, True]
    assert page(other, 0).equal(page(saved, 3))
    assert page(other, 2).equal(page(saved, 1))


def test_interface_v0_saves_and_reads_tensors(sglang):
    storage, keys = sglang.storage(interface_v1=0), hashes(3)
    values = [torch.randn(2 * 2 * 4 * 2 * 4) for _ in keys]
    assert storage.batch_set(keys[:2], values[:2])
    assert storage.batch_exists(keys) == 2
    into = [torch.zeros_like(value) for value in values]
    found = storage.batch_get(keys, into)
    assert found[0].equal(values[0])
    assert found[1].equal(values[1])
    assert found[2] is None
    assert storage.set(keys[2], values[2])
    assert storage.get(keys[2], into[2]).equal(values[2])


def test_a_prefix_is_as_long_as_every_pool_has_what_it_needs(sglang):
    storage, state = sglang.storage(HostPool().fill(1)), HostPool().fill(2)
    storage.register_mem_host_pool_v2(state, "mamba")
    keys = hashes(6)
    storage.batch_set_v1(keys[:5], indices(range(5)))
    storage.batch_set_v2([PoolTransfer("mamba", indices([7, 8]), [keys[1], keys[3]])])
    asked = PoolTransfer("mamba", None, keys[5:], PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(keys, [asked])
    assert found.kv_hit_pages == 4
    assert found.extra_pool_hit_pages == {"kv": 5, "mamba": 4}
    assert found.restorable_prefix_pages == [2, 4]
    every = PoolTransfer("mamba", None, keys, PoolHitPolicy.ALL_PAGES)
    assert storage.batch_exists_v2(keys, [every]).kv_hit_pages == 0
    assert storage.batch_exists_v2(keys).kv_hit_pages == 5


def test_each_pool_has_pages_of_its_own(sglang):
    kv, window = HostPool().fill(1), HostPool().fill(2)
    storage, keys = sglang.storage(kv), hashes(2)
    storage.register_mem_host_pool_v2(window, "swa")
    transfers = [
        PoolTransfer("kv", indices([0, 1]), keys),
        PoolTransfer("swa", indices([4, 5]), keys),
    ]
    assert storage.batch_set_v2(transfers) == {"kv": [True, True], "swa": [True, True]}
    expected = page(kv, 0).clone(), page(window, 5).clone()
    kv.kv_buffer.zero_()
    window.kv_buffer.zero_()
    assert storage.batch_get_v2(transfers) == {"kv": [True, True], "swa": [True, True]}
    assert page(kv, 0).equal(expected[0])
    assert page(window, 5).equal(expected[1])


def test_pages_of_a_pool_that_only_counts_are_always_there(sglang):
    counted = HostPool()
    counted.kv_buffer = None
    storage, keys = sglang.storage(counted), hashes(2)
    assert storage.batch_exists(keys) == 2
    assert storage.batch_set_v1(keys, indices([0, 1])) == [True, True]
    assert storage.batch_get_v1(keys, indices([0, 1])) == [True, True]


def test_a_pool_that_is_not_registered_holds_nothing(sglang):
    storage, keys = sglang.storage(), hashes(1)
    assert storage.batch_get_v2([PoolTransfer("draft", indices([0]), keys)]) == {"draft": [False]}
    assert storage.batch_set_v2([PoolTransfer("draft", indices([0]), keys)]) == {"draft": [False]}


def test_copies_of_ranks_are_saved_by_the_first_and_read_by_all(sglang):
    saved, other = MLATokenToKVPoolHost().fill(1), MLATokenToKVPoolHost().fill(2)
    ranks = [
        sglang.storage(pool, config={"is_mla_model": True, "tp_rank": rank, "tp_size": 2})
        for rank, pool in enumerate((saved, other))
    ]
    keys = hashes(2)
    assert ranks[1].batch_set_v1(keys, indices([0, 1])) == [True, True]
    assert ranks[0].batch_exists(keys) == 0
    assert ranks[0].batch_set_v1(keys, indices([0, 1])) == [True, True]
    assert ranks[1].batch_get_v1(keys, indices([4, 5])) == [True, True]
    assert page(other, 4).equal(page(saved, 0))


def test_the_prefix_that_sglang_names_orders_the_pages(sglang):
    storage, keys = sglang.storage(HostPool().fill(1)), hashes(4)
    extra = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
    assert storage.batch_set_v1(keys[2:], indices([0, 1]), extra) == [True, True]
    assert storage.batch_get_v1(keys[2:], indices([2, 3]), extra) == [True, True]


def test_a_node_that_does_not_answer_is_a_miss(sglang, tmp_path):
    storage = sglang.storage(HostPool(), holdfast=f"unix://{tmp_path}/none.sock")
    keys = hashes(2)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, indices([0, 1])) == [False, False]
    assert storage.batch_set_v1(keys, indices([0, 1])) == [False, False]


def test_an_error_of_the_host_pool_is_a_miss_and_reaches_no_request(sglang, monkeypatch):
    pool = HostPool().fill(1)
    storage, keys = sglang.storage(pool), hashes(2)

    def fail(_indices):
        raise RuntimeError("no such page")

    monkeypatch.setattr(pool, "get_page_buffer_meta", fail)
    assert storage.batch_set_v1(keys, indices([0, 1])) == [False, False]
    assert storage.batch_get_v1(keys, indices([0, 1])) == [False, False]


def test_a_fault_is_logged_once_until_many_others_were(sglang, monkeypatch, caplog):
    pool = HostPool().fill(1)
    storage, keys = sglang.storage(pool), hashes(1)

    def logged_after(fault):
        def fail(_indices):
            raise RuntimeError(f"no page {fault}")

        monkeypatch.setattr(pool, "get_page_buffer_meta", fail)
        storage.batch_get_v1(keys, indices([0]))
        return sum("'no page 0'" in text for text in caplog.messages)

    assert [logged_after(0), logged_after(0), logged_after(1), logged_after(0)] == [1] * 4
    for other in range(2, 1_000):
        assert logged_after(other) == 1
    assert logged_after(0) == 2


def test_names_that_are_no_hashes_are_a_miss(sglang):
    storage = sglang.storage()
    assert storage.batch_exists(["not hexadecimal"]) == 0
    assert storage.batch_set_v1(["00ff"], indices([0])) == [False]
    after = HiCacheStorageExtraInfo(prefix_keys=["not hexadecimal"])
    assert storage.batch_set_v1(hashes(1), indices([0]), after) == [False]


def test_nothing_is_found_or_saved_after_the_weights_were_updated(sglang):
    storage, keys = sglang.storage(HostPool().fill(1)), hashes(1)
    assert storage.batch_set_v1(keys, indices([0])) == [True]
    WeightUpdater().update_weights_from_tensor([])
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, indices([0])) == [False]
    assert sglang.storage().batch_exists(keys) == 1


def test_clear_drops_the_pages_from_the_node(sglang):
    storage, keys = sglang.storage(HostPool().fill(1)), hashes(2)
    storage.batch_set_v1(keys, indices([0, 1]))
    storage.clear()
    assert storage.batch_exists(keys) == 0


def test_pages_of_other_arguments_are_not_found_if_sglang_chose_them(sglang):
    """The command line names neither the backend nor the device."""
    keys = hashes(1)
    sglang.storage(HostPool().fill(1)).batch_set_v1(keys, indices([0]))
    assert sglang.storage().batch_exists(keys) == 1
    assert sglang.storage(arguments={"attention_backend": "triton"}).batch_exists(keys) == 0
    assert sglang.storage(arguments={"device": "npu"}).batch_exists(keys) == 0


@pytest.mark.parametrize(
    "config",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"tp_rank": 0, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ],
)
def test_pages_of_another_rank_or_size_are_not_found(sglang, config):
    keys = hashes(1)
    sglang.storage(HostPool().fill(1)).batch_set_v1(keys, indices([0]))
    assert sglang.storage(config=config).batch_exists(keys) == 0
