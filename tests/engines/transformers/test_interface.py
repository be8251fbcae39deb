"""The binding against the caches of the transformers that is installed."""

import importlib.metadata
from types import SimpleNamespace

import pytest

transformers = pytest.importorskip("transformers")

from transformers import cache_utils  # noqa: E402

from holdfast.engines import interface as shared  # noqa: E402
from holdfast.engines.interface import InterfaceError, differences_of  # noqa: E402
from holdfast.engines.transformers.interface import INTERFACE, check_interface  # noqa: E402
from holdfast.engines.transformers.known_model import cache_argument  # noqa: E402


@pytest.fixture
def newer(monkeypatch):
    """Let the installed version be one that was not tested."""
    monkeypatch.setattr(shared, "_logged", set())
    monkeypatch.setattr("holdfast.engines.transformers.interface.version", lambda _: "6.1.0")


def test_the_installed_version_is_tested_and_has_what_the_binding_uses(caplog):
    assert importlib.metadata.version("transformers") == transformers.__version__
    check_interface()
    assert differences_of(INTERFACE) == []
    assert "not tested" not in caplog.text


def test_another_version_with_the_same_caches_is_used_and_named_once(newer, caplog):
    check_interface()
    check_interface()
    assert caplog.text.count("transformers 6.1.0 was not tested with this Holdfast") == 1


def test_another_version_with_other_caches_is_refused_in_one_sentence(newer, monkeypatch):
    monkeypatch.delattr(cache_utils.DynamicSlidingWindowLayer, "activate_past_recording")
    with pytest.raises(InterfaceError) as refused:
        check_interface()
    assert str(refused.value) == (
        "transformers 6.1.0 has another interface than the versions tested (5.19, 5.20): "
        "DynamicSlidingWindowLayer has no activate_past_recording; install a tested version, or a "
        "newer Holdfast"
    )


def test_a_cache_is_passed_by_the_name_that_the_model_gives_it():
    def newer(input_ids, cache=None): ...

    def older(input_ids, past_key_values=None): ...

    assert cache_argument(SimpleNamespace(forward=newer)) == "cache"
    assert cache_argument(SimpleNamespace(forward=older)) == "past_key_values"
