"""The connector between a scheduler and its worker, with a real node and without an engine."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from holdfast.engines.vllm.encoder import HoldfastEncoderConnector
from holdfast.limits import MIB
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

HASH = "a" * 64
ROWS, WIDTH = 3, 8


class Request:
    """A request with one image, as the scheduler has it."""

    def __init__(self, content, identifier=HASH, **data):
        pixels = SimpleNamespace(data=torch.full((4,), float(content)))
        feature = SimpleNamespace(
            identifier=identifier,
            modality="image",
            mm_position=SimpleNamespace(offset=0, length=ROWS),
            data=data or {"pixel_values": pixels},
        )
        self.mm_features = [feature]

    def get_num_encoder_embeds(self, index):
        return ROWS


def output_of(content):
    """What the encoder computes from an image."""
    return torch.full((ROWS, WIDTH), float(content))


class Engine:
    """The two sides of one engine; `run` computes one request in a step of its own."""

    def __init__(self, address, role):
        self.scheduler, self.worker = (
            HoldfastEncoderConnector(config_of(address, role), side)
            for side in (ECConnectorRole.SCHEDULER, ECConnectorRole.WORKER)
        )

    def run(self, request, content):
        """Return the output that the request gets, and whether its encoder ran."""
        (feature,) = request.mm_features
        end_s = time.monotonic() + 60
        while not self.scheduler.ensure_cache_available(request, 0):
            assert time.monotonic() < end_s
            time.sleep(0.001)
        is_held = self.scheduler.has_cache_item(feature.identifier)
        self.scheduler.update_state_after_alloc(request, 0)
        step = SimpleNamespace(free_encoder_mm_hashes=[])
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(step))
        cache = {}
        if self.worker.is_consumer:
            self.worker.start_load_caches(cache)
        if not is_held:
            cache[feature.identifier] = output_of(content)
            if self.worker.is_producer:
                self.worker.save_caches(cache, feature.identifier)
        self.worker.clear_connector_metadata()
        return cache[feature.identifier], not is_held

    def close(self):
        """End after everything is saved."""
        for side in (self.worker, self.scheduler):
            side.shutdown()


def config_of(address, role):
    """What vLLM tells of an engine with an encoder of images."""
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=dict),
        dtype="torch.float32",
        quantization=None,
        disable_sliding_window=False,
        multimodal_config=SimpleNamespace(),
    )
    transfer = SimpleNamespace(
        is_ec_producer=role != "ec_consumer",
        is_ec_consumer=role != "ec_producer",
        engine_id="engine",
        ec_connector_extra_config={"holdfast": address, "model_digest": "weights"},
    )
    return SimpleNamespace(
        model_config=model,
        ec_transfer_config=transfer,
        load_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(rank=0),
    )


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Open engines of one node, one after the other; on a busy machine they wait for its answer."""
    monkeypatch.setattr("holdfast.engines.vllm.encoder.connector.WAIT_S", 60.0)
    engines = []
    with NodeUnderTest(tmp_path / "n", 64 * MIB, 64 * MIB) as node:

        def after_the_last(role="ec_both"):
            if engines:
                engines[-1].close()
            engines.append(Engine(node.address, role))
            return engines[-1]

        yield after_the_last
        engines[-1].close()


def test_an_engine_loads_what_another_has_encoded(engine):
    assert engine("ec_producer").run(Request(1), 1)[1]
    found, encoded = engine("ec_consumer").run(Request(1), 1)
    assert not encoded
    assert torch.equal(found, output_of(1))


def test_another_content_of_one_identifier_is_encoded(engine):
    engine().run(Request(1), 1)
    found, encoded = engine().run(Request(2), 2)
    assert encoded
    assert torch.equal(found, output_of(2))


def test_an_identifier_that_gets_another_content_in_an_engine_names_nothing_from_then_on(engine):
    engine().run(Request(1), 1)
    engine().run(Request(2), 2)
    later = engine()
    assert not later.run(Request(1), 1)[1]
    assert later.run(Request(2), 2)[1]
    assert later.run(Request(1), 1)[1]


@pytest.mark.parametrize(
    "unnamed",
    [{"identifier": "photo-1"}, {"address": SimpleNamespace(data=0)}, {"pixel_values": None}],
    ids=["named by a client", "in shared memory", "without its content"],
)
def test_an_item_whose_content_no_name_says_is_encoded_each_time(engine, unnamed, caplog):
    fields = {k: SimpleNamespace(data=None) if v is None else v for k, v in unnamed.items()}
    for _ in range(2):
        assert engine().run(Request(1, **fields), 1)[1]
    assert "outputs of encoders are computed and not kept" in caplog.text
