"""Real vLLM on the CPU: what one engine has encoded, another gets from the node."""

import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from audio_model import AUDIO_TOKEN, BEGIN, END, make_audio_model

from holdfast.limits import MIB
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, BEGIN, AUDIO_TOKEN, END, 7, 8]
ANSWER = 4


def until(what, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class Place:
    """A node, and engines whose encoder outputs it keeps; KV is not kept."""

    def __init__(self, real, folder):
        self._real, self.folder = real, folder
        self.model = make_audio_model(folder / "model")
        self.node = NodeUnderTest(folder / "node", 64 * MIB, 64 * MIB)
        self.engines = []

    def start(self):
        engine = self._real.Engine(
            self.folder / f"engine-{len(self.engines)}.log",
            model=str(self.model),
            dtype="float32",
            max_model_len=1024,
            kv_cache_memory_bytes=32 * MIB,
            ec_transfer={
                "ec_connector": "HoldfastEncoderConnector",
                "ec_connector_module_path": "holdfast.engines.vllm.encoder",
                "ec_role": "ec_both",
                "ec_connector_extra_config": {"holdfast": self.node.address},
            },
        )
        engine.wait_ready()
        engine.count_encodings()
        self.engines.append(engine)
        return engine

    def encode(self, engine, seed, name=None):
        """Ask about a sound; return the answer, and how often the engine encoded for it."""
        before = engine.encoded()
        answer = engine.ask_sound(prompt=PROMPT, seed=seed, tokens=ANSWER, name=name)
        return answer, engine.encoded() - before

    def blocks(self):
        return self.node.status()["blocks"]


@pytest.fixture(scope="module")
def place(real, tmp_path_factory):
    place = Place(real, tmp_path_factory.mktemp("encoder"))
    yield place
    for engine in place.engines:
        engine.close()
    place.node.process.stop()


@pytest.fixture(scope="module")
def engine(place):
    return place.start()


@pytest.fixture(scope="module")
def other_engine(place, engine):
    return place.start()


def test_another_engine_gets_the_output_of_an_encoder_from_the_node(place, engine, other_engine):
    before = place.blocks()
    answer, encoded = place.encode(engine, 1)
    assert encoded == 1
    until(lambda: place.blocks() > before)
    other, encoded = place.encode(other_engine, 1)
    assert encoded == 0
    assert (other["tokens"], other["logprobs"]) == (answer["tokens"], answer["logprobs"])


def test_another_sound_is_encoded(place, engine):
    _, encoded = place.encode(engine, 2)
    assert encoded == 1


def test_a_sound_that_a_client_has_named_is_encoded_again_and_not_saved(place, engine):
    before = place.blocks()
    for seed in (3, 4):
        engine.forget_media()
        _, encoded = place.encode(engine, seed, name="mine")
        assert encoded == 1
    assert place.blocks() == before


def test_a_name_that_looks_like_a_hash_gives_no_engine_the_output_of_another_sound(
    place, engine, other_engine
):
    before = place.blocks()
    first, _ = place.encode(engine, 6, name="a" * 64)
    until(lambda: place.blocks() > before)
    other, encoded = place.encode(other_engine, 7, name="a" * 64)
    assert encoded == 1
    assert other["logprobs"] != first["logprobs"]


def test_without_its_node_an_engine_encodes(place, engine):
    answer, _ = place.encode(engine, 5)
    place.node.kill()
    engine.forget_media()
    again, encoded = place.encode(engine, 5)
    place.node.start()
    assert encoded == 1
    assert (again["tokens"], again["logprobs"]) == (answer["tokens"], answer["logprobs"])
