import math

import pytest

pytest.importorskip("vllm")

from holdfast.engines.vllm.options import failure_policy_advice, read_options, refit_advice
from holdfast.errors import ConfigError


def test_the_default_options_give_a_private_node():
    setting = read_options({})
    assert setting.address == ""
    assert setting.domain == "default"
    assert setting.cover_deadline_s is None
    assert setting.saves


@pytest.mark.parametrize(
    ("role", "loads", "saves"),
    [("kv_both", True, True), ("kv_consumer", True, False), ("kv_producer", False, True)],
)
def test_the_role_says_whether_an_engine_loads_and_saves(role, loads, saves):
    setting = read_options({}, role)
    assert (setting.loads, setting.saves) == (loads, saves)


@pytest.mark.parametrize("role", ["kv_sender", "", None])
def test_an_unknown_role_is_refused_by_name(role):
    with pytest.raises(ConfigError, match=r"kv_role: .* is unknown; known are kv_both, kv_consum"):
        read_options({}, role)


def test_a_producer_that_may_not_save_is_refused(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text(
        "listen: unix:///run/h.sock\n"
        "tiers: [{kind: host, capacity: 64 MiB}]\n"
        "engine: {save: false}\n"
    )
    assert not read_options({"holdfast": str(file)}, "kv_consumer").saves
    with pytest.raises(
        ConfigError, match=r"kv_producer only saves, and engine\.save in .* is false"
    ):
        read_options({"holdfast": str(file)}, "kv_producer")


def test_an_address_is_taken_as_it_is():
    assert read_options({"holdfast": "unix:///run/h.sock"}).address == "unix:///run/h.sock"
    assert read_options({"holdfast": "/run/h.sock"}).address == "/run/h.sock"


def test_the_longest_wait_for_an_answer_is_a_minute():
    assert read_options({"cover_deadline_ms": 60_000}).cover_deadline_s == 60.0


def test_a_yaml_file_gives_address_and_engine_section(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text(
        "listen: unix:///run/h.sock\n"
        "tiers: [{kind: host, capacity: 64 MiB}]\n"
        "engine: {deadline_s: 2, save: false, model_digest: mine}\n"
    )
    setting = read_options({"holdfast": str(file)})
    assert setting.address == "unix:///run/h.sock"
    assert (setting.fetch_deadline_s, setting.saves, setting.model_digest) == (2, False, "mine")
    assert read_options({"holdfast": str(file), "model_digest": "x"}).model_digest == "x"


def test_a_node_for_other_machines_only_is_refused(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text("listen: tcp://127.0.0.1:9000\ntiers: [{kind: host, capacity: 64 MiB}]\n")
    with pytest.raises(ConfigError, match="add a unix:///path to its listen"):
        read_options({"holdfast": str(file)})


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"holdfats": "x"}, r"extra_config\.holdfats is unknown; known are holdfast, domain"),
        ({"holdfast": "node"}, r"extra_config\.holdfast: node address 'node' is not unix.*YAML"),
        *(
            ({"holdfast": target}, r"extra_config\.holdfast: .* a pool's target, .* name a node on")
            for target in ("tcp://10.0.0.7:7441", "tcp://flash-1", "10.0.0.7:7441", "[::1]:7441")
        ),
        ({"holdfast": 5}, r"extra_config: Expected `str`, got `int` - at `\$\.holdfast`"),
        ({"block_tokens": -1}, r"extra_config\.block_tokens: -1 is below 0"),
        ({"cover_deadline_ms": 0}, r"extra_config\.cover_deadline_ms: 0 is not above 0 and"),
        ({"cover_deadline_ms": math.nan}, r"cover_deadline_ms: nan is not above 0 and at most 60,"),
        ({"cover_deadline_ms": math.inf}, r"cover_deadline_ms: inf is not above 0 and at most 60,"),
        ({"cover_deadline_ms": 60_001}, r"cover_deadline_ms: 60001 is not above 0 and at most 60"),
        ({"domain": ""}, r"extra_config\.domain is empty"),
        ({"domain": "My Team"}, r"extra_config\.domain: 'My Team' is not the name of a domain"),
        ({"holdfast": "/no/such.yaml"}, r"/no/such\.yaml: cannot be read"),
    ],
)
def test_an_invalid_option_is_refused_by_name(extra, named):
    with pytest.raises(ConfigError, match=named):
        read_options(extra)


def test_advice_is_given_for_a_load_failure_policy_of_fail():
    assert failure_policy_advice("recompute") is None
    assert '"kv_load_failure_policy":"recompute"' in failure_policy_advice("fail")


def test_advice_is_given_for_an_engine_whose_weights_are_replaced():
    assert refit_advice(read_options({}), None) is None
    assert "reset_prefix_cache(reset_connector=True)" in refit_advice(read_options({}), "nccl")


def test_weights_that_are_replaced_are_not_fixed():
    settings = read_options({"fixed_weights": True})
    assert refit_advice(settings, None) is None
    with pytest.raises(ConfigError, match="fixed_weights: true, but weight_transfer_config"):
        refit_advice(settings, "nccl")


def test_blocks_are_exact_or_portable_and_nothing_else():
    assert read_options({}).layout == "exact"
    assert read_options({"layout": "portable"}).layout == "portable"
    with pytest.raises(ConfigError, match=r"Invalid enum value 'opaque' - at `\$\.layout`"):
        read_options({"layout": "opaque"})


def test_saves_of_a_producer_are_not_deferred():
    assert read_options({"save": "auto"}).save == "auto"
    assert read_options({"save": "auto"}, "kv_producer").save == "when_full"
    with pytest.raises(ConfigError, match="before_eviction does not fit kv_role kv_producer"):
        read_options({"save": "before_eviction"}, "kv_producer")
