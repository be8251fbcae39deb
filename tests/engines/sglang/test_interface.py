"""The binding against the recorded interface of SGLang: with stubs here, with SGLang in `soak`."""

import inspect
import logging

import pytest
from sglang_stubs import HiCacheStorage, PoolTransfer

from holdfast.engines.sglang.interface import RECORDED, members
from holdfast.errors import ConfigError

METHODS = {
    path.rpartition(".")[2]: parameters
    for path, parameters in RECORDED.items()
    if "HiCacheStorage." in path
}


def test_the_storage_has_the_parameters_that_sglang_passes(sglang):
    kind = type(sglang.storage())
    for method, parameters in METHODS.items():
        assert tuple(inspect.signature(getattr(kind, method)).parameters) == parameters


def test_the_stubs_have_the_recorded_interface(sglang):
    sglang.storage()  # puts the stubs in their places
    from holdfast.engines.sglang.interface import differences

    assert differences(RECORDED) == []


def test_another_version_with_the_same_interface_is_served_and_named_once(sglang, caplog):
    with caplog.at_level(logging.WARNING):
        sglang.storage(version="0.6.0")
        sglang.storage(version="0.6.0")
    named = [record.message for record in caplog.records if "0.6.0" in record.message]
    assert named == [
        (
            "SGLang 0.6.0 is not tested with Holdfast, only 0.5.23 is; its storage interface is "
            "the same"
        )
    ]


def test_another_version_with_another_interface_is_refused(sglang, monkeypatch):
    def moved(self, host_indices, keys, extra_info=None): ...

    monkeypatch.setattr(HiCacheStorage, "batch_get_v1", moved)
    with pytest.raises(ConfigError) as refused:
        sglang.storage(version="0.6.0")
    assert str(refused.value) == (
        "SGLang 0.6.0 differs from 0.5.23, which Holdfast is tested with, in "
        "HiCacheStorage.batch_get_v1 has self, host_indices, keys, extra_info instead of self, "
        "keys, host_indices, extra_info; install sglang==0.5.23, or a Holdfast that is tested with "
        "0.6.0"
    )


def test_an_interface_that_lost_a_part_is_refused(sglang, monkeypatch):
    monkeypatch.delattr(HiCacheStorage, "clear")
    with pytest.raises(ConfigError, match=r"HiCacheStorage\.clear is missing"):
        sglang.storage(version="0.6.0")


def test_further_fields_are_no_difference():
    assert {"keys", "name"} < {*members(PoolTransfer)}


def test_a_model_with_images_is_refused(sglang):
    with pytest.raises(ConfigError, match="64 bits"):
        sglang.storage(multimodal=True)
