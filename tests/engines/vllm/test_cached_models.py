"""Real vLLM with small models of each kind: the table of cached models is true.

A model answers after a restart of its engine as before, by the log-probabilities of all steps:
tokens alone prove nothing, because a recurrent model has the same ones with a wrong state. Plain
full attention is what all other tests here use.
"""

import random

import pytest

pytest.importorskip("vllm")

from small_engines import SmallEngines, check_equal, is_equal
from small_models import MAMBA2, VOCABULARY, latent_dtype

from holdfast.cli.model_caching import kind_of_shape
from holdfast.engines import cached_models
from holdfast.sim.model.catalogue import load_model

pytestmark = pytest.mark.vllm

KINDS = {
    "mla": cached_models.FULL,
    "gemma3": cached_models.WINDOWS,
    "gpt_oss": cached_models.WINDOWS,
    "llama4": cached_models.CHUNKS,
    "mistral": cached_models.WINDOW_ONLY,
    "gemma4": cached_models.SIZES,
    "lfm2": cached_models.RECURRENT,
    "qwen3_next": cached_models.RECURRENT,
    "falcon_h1": cached_models.RECURRENT,
    "nemotron_h": cached_models.RECURRENT,
}
BLOCK, TOKENS, ANSWER = 128, 1_100, 8
HELD = TOKENS // BLOCK * BLOCK
GROUPS = {name: 2 for name in KINDS if name not in ("mla", "mistral")}
OPTIONS = {"falcon_h1": MAMBA2, "nemotron_h": MAMBA2, "qwen3_next": {"dtype": "bfloat16"}}
READ_BY_DOCTOR = KINDS.keys() - {"lfm2", "qwen3_next", "falcon_h1", "nemotron_h"}
"""Those whose config.json has all fields that a published one has."""

MLA_PAGE = 128 if latent_dtype() == "bfloat16" else 16
"""Tokens of a page of latents: vLLM's on a CPU with AMX, and without."""
NO_AMX = pytest.mark.skipif(MLA_PAGE != 16, reason="pages of latents for AMX are not converted")


def words(name):
    return random.Random(name).choices(range(10, VOCABULARY), k=TOKENS)


@pytest.fixture(scope="module")
def harness(real, tmp_path_factory):
    harness = SmallEngines(real, tmp_path_factory.mktemp("m"))
    yield harness
    harness.node.process.stop()


def ask(engine, name):
    [answer] = engine.ask(prompts=[words(name)], tokens=ANSWER, logprobs=3, detokenize=False)
    return answer


def test_every_kind_that_the_table_calls_cached_has_a_model_here():
    cached = {k for k in cached_models.MODEL_KINDS if k.caching is cached_models.Caching.YES}
    assert cached == set(KINDS.values())


def test_doctor_finds_the_same_kind_in_the_config_of_a_model(harness):
    found = {name: kind_of_shape(load_model(str(harness.model(name)))) for name in READ_BY_DOCTOR}
    assert found == {name: KINDS[name] for name in READ_BY_DOCTOR}


QUICK = ("gemma3", "lfm2")


@pytest.mark.parametrize("name", [
    *QUICK,
    *(pytest.param(n, marks=pytest.mark.soak) for n in KINDS if n not in (*QUICK, "mla")),
])  # fmt: skip
def test_a_model_of_each_kind_answers_equally_after_a_restart(harness, name):
    options = OPTIONS.get(name, {})
    first = harness.start(name, **options).wait_ready()
    cold = ask(first, name)
    first.close()
    again = harness.start(name, **options).wait_ready()
    loaded = ask(again, name)
    unit = again.hit_unit()
    held = TOKENS // unit * unit
    assert (cold["cached"], loaded["cached"]) == (0, held)
    check_equal(loaded, cold)

    # What a comparison must be able to see: wrong bytes, and a group that is not loaded.
    def ask_again():
        assert again.reset()
        return ask(again, name)

    again.shift(by=4096)
    shifted = ask_again()
    assert shifted["cached"] == held
    assert not is_equal(shifted, cold)
    for group in range(GROUPS.get(name, 1)):
        again.leave_out(group=group)
        assert not is_equal(ask_again(), cold), f"group {group}"
    again.leave_out(group=None)
    check_equal(ask_again(), cold)
    again.fail_loads()
    failed = ask_again()
    assert failed["cached"] == 0
    check_equal(failed, cold)
    again.close()


@pytest.mark.parametrize("layout", ["exact", pytest.param("portable", marks=NO_AMX)])
def test_latent_pages_are_loaded_as_they_were_computed(harness, layout):
    # Answers say nothing here: vLLM's kernels for CPUs without AMX give other log-probabilities in
    # prefill than in decode, without a connector, too.
    engine = harness.start("mla", layout, dtype=latent_dtype()).wait_ready()
    assert f"{layout} blocks of {BLOCK} tokens" in engine.log.read_text()
    before = harness.node.status()["blocks"]
    cold, computed = ask(engine, "mla"), engine.digests(count=HELD // MLA_PAGE)
    harness.wait_holding(before + HELD // BLOCK)
    loaded, found = ask(engine, "mla"), engine.digests(count=HELD // MLA_PAGE)
    assert (cold["cached"], loaded["cached"]) == (0, HELD)
    assert found == computed
    assert len(set(found)) == HELD // MLA_PAGE
    engine.close()
