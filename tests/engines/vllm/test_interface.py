"""The bindings of vLLM against the interfaces of the vLLM that is installed, method by method."""

import importlib
import inspect

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from holdfast.engines import interface as shared
from holdfast.engines.interface import InterfaceError, differences_of
from holdfast.engines.vllm import HoldfastConnector, interface
from holdfast.engines.vllm.encoder import HoldfastEncoderConnector
from holdfast.engines.vllm.tier import HoldfastTier
from holdfast.engines.vllm.tier import interface as tier_interface

BINDINGS = {
    HoldfastConnector: (KVConnectorBase_V1, interface.CONNECTOR),
    HoldfastEncoderConnector: (ECConnectorBase, interface.ENCODER),
    HoldfastTier: (SecondaryTierManager, tier_interface.TIER),
}


def overridden(ours, base):
    """Return the functions of vLLM's class that a binding has in place of them, by name."""
    found = {}
    for name, given in vars(base).items():
        its = getattr(given, "__func__", given)
        if inspect.isfunction(its) and name in vars(ours):
            own = vars(ours)[name]
            found[name] = (getattr(own, "__func__", own), its)
    return found


@pytest.mark.parametrize("ours", BINDINGS)
def test_every_method_that_a_binding_replaces_is_compared(ours):
    base, expected = BINDINGS[ours]
    assert overridden(ours, base).keys() <= {*expected.methods, *expected.newer}


@pytest.mark.parametrize(
    ("ours", "base"), [*((ours, each[0]) for ours, each in BINDINGS.items()),
                       (HoldfastConnector, SupportsHMA)]
)  # fmt: skip
def test_the_methods_of_a_binding_take_what_vllm_passes(ours, base):
    for name, (own, its) in overridden(ours, base).items():
        found, expected = inspect.signature(own).parameters, inspect.signature(its).parameters
        plain = [one for one, each in expected.items() if each.kind is not each.VAR_KEYWORD]
        assert list(found)[: len(plain)] == plain, name
        assert all(
            each.default is not each.empty or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            for each in list(found.values())[len(plain) :]
        ), name


@pytest.mark.parametrize(
    "table",
    [interface.CONNECTOR_INTERFACE, interface.ENCODER_INTERFACE, tier_interface.INTERFACE],
)
def test_the_installed_vllm_has_what_the_bindings_use(table):
    assert differences_of(table) == []


@pytest.mark.parametrize(
    ("module", "name", "base", "method"),
    [
        ("vllm", "HoldfastConnector", KVConnectorBase_V1, "on_new_request"),
        ("vllm.encoder", "HoldfastEncoderConnector", ECConnectorBase, "ensure_cache_available"),
        ("vllm.tier", "HoldfastTier", SecondaryTierManager, "on_schedule_end"),
    ],
)
def test_a_vllm_with_another_interface_is_refused_in_one_sentence(
    module, name, base, method, monkeypatch
):
    def moved(self, something_else): ...

    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    monkeypatch.setattr(base, method, moved)
    with pytest.raises(InterfaceError) as refused:
        getattr(importlib.import_module(f"holdfast.engines.{module}"), name)
    text = str(refused.value)
    assert text.startswith("vLLM 0.40.0 has another interface than the versions tested (0.32): ")
    assert f"{base.__name__}.{method} takes something_else" in text
    assert text.endswith("; install a tested version, or a newer Holdfast")


def test_another_vllm_with_the_same_interface_is_used_and_named_once(monkeypatch, caplog):
    monkeypatch.setattr(shared, "_logged", set())
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    for _ in range(2):
        interface.check_connector()
        interface.check_encoder_connector()
        tier_interface.check_interface()
    assert caplog.text.count("vLLM 0.40.0 was not tested with this Holdfast (tested: 0.32)") == 1


def test_a_class_that_vllm_has_moved_is_a_difference(monkeypatch):
    from vllm.v1.core import kv_cache_manager

    monkeypatch.delattr(kv_cache_manager, "KVCacheBlocks")
    assert differences_of(interface.CONNECTOR_INTERFACE) == [
        "there is no vllm.v1.core.kv_cache_manager.KVCacheBlocks"
    ]
