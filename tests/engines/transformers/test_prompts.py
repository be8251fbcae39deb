"""Not one prompt, or another prompt than the cache's: an error, and never a wrong text."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from random_models import (  # noqa: E402
    answer,
    image_model,
    image_prompt,
    model_of,
    new_model,
    own_cache,
    prompt_of,
)

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


def model_of_rope(kind):
    """Return a model that was trained with prompts of up to 160 tokens."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 160, "short_factor": [1.0] * 8}
        rope |= {"long_factor": [2.0] * 8}
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, head_dim=16, rope_parameters=rope, max_position_embeddings=160,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 159), ("longrope", 160)])
def test_keys_that_depend_on_the_length_of_the_prompt_are_refused(kind, limit, store):
    model = model_of_rope(kind)
    message = f"tokens; beyond {limit} the rope of this model .{kind}"
    for tokens in (limit + 1, 170):
        with pytest.raises(BlockError, match=f"{tokens} {message}"):
            cache_of(IDS[:, :tokens], store, model)
    assert cache_of(IDS[:, :limit], store, model).prefix.tokens == 128


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_states_of_a_prompt_that_was_too_long_for_its_keys_are_not_saved(kind, store):
    model = model_of_rope(kind)
    for ids in (IDS, IDS[:, :150]):  # all of the prompt, or its beginning
        cache = own_cache(model, IDS, PROMPT)
        with pytest.raises(BlockError, match=r"170 tokens; beyond 1.* do not save"):
            holdfast.transformers.save(model, ids, cache, store, block_tokens=BLOCK)
    assert cache_of(IDS[:, :150], store, model).prefix.fetched == 0


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


class KeptAsGiven(transformers.cache_utils.QuantizedLayer):
    """A quantised layer as transformers keeps it, whose quantisation changes nothing."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def test_a_cache_that_keeps_its_older_tokens_in_another_form_is_not_saved(store):
    """Its layers show the last tokens only, which would be saved in place of the first ones."""
    model, ids = model_of("llama"), prompt_of(4, 48)
    cache = transformers.cache_utils.Cache(layers=[KeptAsGiven() for _ in range(4)])
    with torch.no_grad():
        for start, stop in [(0, 48), *((at, at + 1) for at in range(48, 128))]:
            turn = torch.cat([ids, IDS], dim=1)[:, start:stop]
            model(turn, past_key_values=cache, use_cache=True)
    whole = torch.cat([ids, IDS], dim=1)[:, :129]
    with pytest.raises(BlockError, match=r"layer 0, a KeptAsGiven, keeps .* DynamicCache"):
        holdfast.transformers.save(model, whole, cache, store, block_tokens=BLOCK)
    assert cache_of(whole, store).prefix.fetched == 0


def test_a_prompt_with_an_image_is_refused(store):
    """The tokens of an image say where it is, and not what it shows."""
    model, prompt = image_model(), image_prompt(6)
    for other in ("mm_token_type_ids", "pixel_values", "image_grid_thw"):
        given = {name: prompt[name] for name in ("input_ids", "attention_mask", other)}
        with pytest.raises(BlockError, match=f"the model takes {other}, too"):
            cache_of(given, store, model)
    with pytest.raises(BlockError, match="ids: token 1000 stands for a part of an image"):
        cache_of(prompt["input_ids"], store, model)
    out = model.generate(**prompt, max_new_tokens=4, return_dict_in_generate=True)
    with pytest.raises(BlockError, match="ids: token 1000 stands for a part of an image"):
        holdfast.transformers.save(
            model, out.sequences, out.past_key_values, store, block_tokens=BLOCK
        )


@pytest.mark.parametrize("held", [0, 64, 160])
def test_a_text_after_a_prompt_with_an_image_has_positions_of_its_own(held, store):
    """A model with M-RoPE remembers how many positions the last prompt's image has left out."""
    model = image_model()
    right, scores = answer(model, IDS)
    if held:
        cache_of(IDS[:, : held + 1], store, model)
    model.generate(**image_prompt(6), max_new_tokens=2)
    cache = cache_of(IDS, store, model)
    assert cache.prefix.fetched == held
    found, its = answer(model, IDS, past_key_values=cache)
    assert torch.equal(right, found)
    assert (scores - its).abs().max() < 1e-4
    # What was computed and saved then is right, too.
    again, _ = answer(model, IDS, past_key_values=cache_of(IDS, store, model))
    assert torch.equal(right, again)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"position_ids": torch.arange(9, 179)[None]}, "the model takes position_ids, too"),
        ({"mm_token_type_ids": torch.ones_like(IDS)}, "the model takes mm_token_type_ids, too"),
    ],
)
def test_inputs_that_are_not_tokens_are_refused(inputs, message, store):
    with pytest.raises(BlockError, match=message):
        cache_of({"input_ids": IDS} | inputs, store, image_model())


def test_what_a_processor_says_of_a_text_is_no_other_input(store):
    whole = {"input_ids": IDS, "mm_token_type_ids": torch.zeros_like(IDS), "length": [PROMPT]}
    assert cache_of(whole, store, image_model()).prefix.computed == 160


def test_a_model_that_attends_to_later_tokens_is_refused(store):
    backward, both_ways = new_model("llama"), new_model("gemma3")
    backward.config.is_causal = False
    both_ways.config.use_bidirectional_attention = True
    for model in (backward, both_ways):
        with pytest.raises(BlockError, match="the model attends to later tokens"):
            cache_of(IDS, store, model)


def test_a_model_with_an_encoder_is_refused(store):
    config = transformers.BartConfig(
        vocab_size=1000, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
        decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    with pytest.raises(BlockError, match="the model has an encoder"):
        cache_of(IDS, store, model)


def test_a_model_that_is_divided_over_processes_is_refused(store):
    """Each process has a part of the heads, and all of them would save under the same names."""
    model = new_model("llama")
    model._tp_size = 2
    with pytest.raises(BlockError, match="divided over 2 processes"):
        cache_of(IDS, store, model, model_digest="7")
