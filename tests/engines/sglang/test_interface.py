"""The binding against the interface of SGLang: with stubs here, with SGLang in `soak`."""

import inspect
import logging

import pytest
from sglang_stubs import HiCacheStorage

from holdfast.engines import interface as shared
from holdfast.engines.sglang.interface import STORAGE
from holdfast.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch):
    monkeypatch.setattr(shared, "_logged", set())


def test_the_storage_has_the_parameters_that_sglang_passes(sglang):
    kind = type(sglang.storage())
    for method, parameters in STORAGE.methods.items():
        assert tuple(inspect.signature(getattr(kind, method)).parameters)[1:] == parameters


def test_another_version_with_the_same_interface_is_served_and_named_once(sglang, caplog):
    with caplog.at_level(logging.WARNING):
        sglang.storage(version="0.6.0")
        sglang.storage(version="0.6.0")
    named = [record.message for record in caplog.records if "0.6.0" in record.message]
    assert len(named) == 1
    assert "was not tested with this Holdfast (tested: 0.5.23)" in named[0]


def test_another_version_with_another_interface_is_refused_in_one_sentence(sglang, monkeypatch):
    def moved(self, host_indices, keys, extra_info=None): ...

    monkeypatch.setattr(HiCacheStorage, "batch_get_v1", moved)
    with pytest.raises(shared.InterfaceError) as refused:
        sglang.storage(version="0.6.0")
    assert str(refused.value) == (
        "SGLang 0.6.0 has another interface than the versions tested (0.5.23): "
        "HiCacheStorage.batch_get_v1 takes host_indices, keys, extra_info, not keys, host_indices, "
        "extra_info; install a tested version, or a newer Holdfast"
    )


def test_an_interface_that_lost_a_part_is_refused(sglang, monkeypatch):
    monkeypatch.delattr(HiCacheStorage, "clear")
    with pytest.raises(shared.InterfaceError, match="HiCacheStorage has no clear"):
        sglang.storage(version="0.6.0")


def test_a_model_with_images_is_refused(sglang):
    with pytest.raises(ConfigError, match="64 bits"):
        sglang.storage(multimodal=True)
