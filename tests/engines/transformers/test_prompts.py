"""Not one prompt, or another prompt than the cache's: an error, and never a wrong text."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from random_models import answer, model_of, new_model, prompt_of  # noqa: E402

import holdfast  # noqa: E402
from holdfast.errors import BlockError  # noqa: E402

BLOCK, PROMPT = 32, 170
IDS = prompt_of(1, PROMPT)
PAD = 3


def cache_of(ids, store, model=None, **more):
    found = model_of("llama") if model is None else model
    return holdfast.transformers.cache(found, ids, store, block_tokens=BLOCK, **more)


@pytest.mark.parametrize("generated_from", ["a shorter prompt", "a longer prompt", "padding"])
def test_generate_with_other_ids_than_the_caches_raises(generated_from, store):
    ids = {
        "a shorter prompt": IDS[:, :130],
        "a longer prompt": torch.cat([IDS, IDS[:, :9]], dim=1),
        "padding": torch.cat([torch.full((1, 20), PAD), IDS], dim=1),
    }[generated_from]
    cache = cache_of(IDS, store)
    mask = (ids != PAD).long()
    with pytest.raises(BlockError, match="made for a prompt of 170 tokens, of which it holds 160"):
        model_of("llama").generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4
        )


def test_a_cache_serves_further_turns_of_its_own_conversation(store):
    model = model_of("llama")
    cache = cache_of(IDS, store)
    first, _ = answer(model, IDS, past_key_values=cache)
    turn = torch.cat([first, prompt_of(2, 30)], dim=1)
    expected, scores = answer(model, turn)
    found, its = answer(model, turn, past_key_values=cache)
    assert torch.equal(expected, found)
    assert (scores - its).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.cat([IDS, IDS]), r"shape \(2, 170\); pass the token ids of one prompt"),
        (torch.zeros(1, 0, dtype=torch.long), r"shape \(0,\)"),
        (torch.zeros(1, 5), "torch.float32"),
        (torch.cat([torch.full((1, 9), PAD), IDS], dim=1), "the prompt is padded"),
        (torch.cat([IDS, torch.full((1, 9), PAD)], dim=1), "the prompt is padded"),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[0] + [1] * 169])}, "is padded"),
    ],
)
def test_what_is_not_one_prompt_without_padding_is_refused(ids, message, store):
    with pytest.raises(BlockError, match=message):
        cache_of(ids, store)


def test_lists_arrays_and_the_output_of_a_tokenizer_are_prompts(store):
    row = IDS[0]
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    cache_of(IDS, store)
    for ids in (row, row.tolist(), row.numpy(), inputs):
        assert cache_of(ids, store).prefix.fetched == 160


def test_a_static_cache_without_room_for_an_answer_is_refused(store):
    with pytest.raises(BlockError, match="max_cache_len: 170 tokens, the prompt has 170"):
        cache_of(IDS, store, max_cache_len=170)


def test_a_model_in_training_mode_is_refused(store):
    with pytest.raises(BlockError, match=r"training mode.*call eval\(\)"):
        cache_of(IDS, store, new_model("llama").train())


def test_a_layer_whose_states_are_not_known_is_refused(store):
    class OtherLayer(transformers.cache_utils.DynamicLayer):
        pass

    with pytest.MonkeyPatch.context() as patch:
        kinds = transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
        patch.setitem(kinds, "full_attention", OtherLayer)
        with pytest.raises(BlockError, match="layer 0 of the model keeps a OtherLayer"):
            cache_of(IDS, store, new_model("llama"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_that_depend_on_the_length_of_the_prompt_are_refused(kind, store):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 160, "short_factor": [1.0] * 8}
        rope |= {"long_factor": [2.0] * 8}
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, head_dim=16, rope_parameters=rope, max_position_embeddings=160,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(BlockError, match=f"170 tokens; beyond 160 the rope of this model .{kind}"):
        cache_of(IDS, store, model)
    assert cache_of(IDS[:, :160], store, model).prefix.tokens == 128


def test_a_dead_node_costs_the_reuse_and_not_the_answer(node, caplog):
    model = model_of("llama")
    with holdfast.open(node.address) as store:
        node.process.stop()
        cache = cache_of(IDS, store)
        assert (cache.prefix.computed, cache.prefix.saved) == (160, 0)
        assert "node" in cache.prefix.reason
        assert torch.equal(answer(model, IDS, past_key_values=cache)[0], answer(model, IDS)[0])
    assert "the prompt is computed" in caplog.text


def test_a_closed_store_costs_the_reuse_and_not_the_answer(store):
    store.close()
    assert cache_of(IDS, store).prefix[:3] == (0, 160, 0)
