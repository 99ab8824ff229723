"""One token at a time: every family's step equals the full forward, whatever happened to the cache before."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer, state_layer
from hf_hybrid_ssm.models.packing import packed_rows
from hf_hybrid_ssm.models.state_layers import RecurrentStateLayer
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from tests.tiny_models import (
    VARIANTS,
    compiles,
    inputs_for,
    language_model,
    own_language_model,
    recording_cache,
    shallow_language_model,
)

PROMPT, STEPS = 9, 14


def text(rows: int, length: int = PROMPT + STEPS, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def steps(model, cache, ids, **options):
    """Logits of ids (B, T), token by token."""
    logits = [model(ids[:, t : t + 1], past_key_values=cache, **options).logits for t in range(ids.shape[1])]
    return torch.cat(logits, 1)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.fixture(params=VARIANTS)
def model(request):
    return language_model(request.param)


@pytest.mark.parametrize("implementation", [None, "torch"])
@torch.inference_mode()
def test_padded_rows(model, implementation):
    """Rows of different lengths, so that no two end a block at the same time."""
    lengths, ids = [2, 6, PROMPT], text(3)
    padded, mask = torch.zeros(3, PROMPT, dtype=torch.long), torch.zeros(3, PROMPT, dtype=torch.long)
    for row, length in enumerate(lengths):
        padded[row, PROMPT - length :], mask[row, PROMPT - length :] = ids[row, :length], 1
    cache = DynamicCache(config=model.config)
    with backend(implementation):
        model(padded, attention_mask=mask, past_key_values=cache)
        got = steps(model, cache, torch.stack([ids[row, n : n + STEPS] for row, n in enumerate(lengths)]))
    for row, length in enumerate(lengths):
        close(got[row], model(ids[row : row + 1, : length + STEPS]).logits[0, length:])


@torch.inference_mode()
def test_static_cache(model):
    ids = text(2)
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + STEPS)
    model(ids[:, :PROMPT], past_key_values=cache)
    states = [layer.states for layer in cache.layers if is_recurrent_state_layer(layer)]
    places = [state.data_ptr() for layer in states for state in layer.values()]
    close(steps(model, cache, ids[:, PROMPT:]), model(ids).logits[:, PROMPT:])
    assert places == [state.data_ptr() for layer in states for state in layer.values()]
    cache.reset()
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {0}
    other = text(2, 4, seed=1)
    close(steps(model, cache, other), model(other).logits)


@pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler")
@pytest.mark.parametrize("variant", ["longhorn + window and full attention", "student: windows and a full layer"])
@torch.inference_mode()
def test_places_of_a_static_cache_that_are_empty_are_not_read(variant):
    """By the attention to all tokens of two rows, one of which has padding on its left."""
    model, ids = language_model(variant), text(2)
    cache = StaticCache(config=model.config, max_cache_len=40)
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :4] = 0
    model(ids[:, :PROMPT], attention_mask=mask, past_key_values=cache)
    own = [layer for layer in cache.layers if not is_recurrent_state_layer(layer)]
    assert own
    for layer in own:
        layer.keys[:, :, PROMPT:], layer.values[:, :, PROMPT:] = torch.nan, torch.nan
    got = steps(model, cache, ids[:, PROMPT:])
    close(got[0], model(ids[:1]).logits[0, PROMPT:])
    close(got[1], model(ids[1:, 4:]).logits[0, PROMPT - 4 :])


def grows(model) -> bool:
    """Whether a cache keeps more of a longer text."""
    sizes = []
    for length in (PROMPT, PROMPT + STEPS):
        cache = DynamicCache(config=model.config)
        model(text(1, length), past_key_values=cache)
        held = (layer.states.values() if is_recurrent_state_layer(layer) else [layer.keys] for layer in cache.layers)
        sizes.append(sum(state.numel() for states in held for state in states))
    return sizes[1] > sizes[0]


@torch.inference_mode()
def test_a_static_cache_that_is_full(model):
    """Where the keys of all tokens are needed there is no room for another; states and windows go on. What was read
    can still be continued, by as many tokens as there is room for."""
    ids, room, is_refused = text(2), PROMPT + 3, grows(model)
    right = model(ids).logits
    for begin in (room, room - 1):  # a token too many, and a piece of two of which one has room
        cache = StaticCache(config=model.config, max_cache_len=room)
        model(ids[:, :PROMPT], past_key_values=cache)
        steps(model, cache, ids[:, PROMPT:begin])
        if not is_refused:
            close(model(ids[:, begin : room + 1], past_key_values=cache).logits, right[:, begin : room + 1])
            close(steps(model, cache, ids[:, room + 1 :]), right[:, room + 1 :])
            continue
        with pytest.raises(IndexError, match=rf"room for {room} tokens.* {room + 1 - begin} after {begin} more"):
            model(ids[:, begin : room + 1], past_key_values=cache)
        assert {int(layer.get_seq_length()) for layer in cache.layers} == {begin}
        if begin < room:
            close(steps(model, cache, ids[:, begin:room]), right[:, begin:room])


@torch.inference_mode()
def test_a_static_cache_of_a_target_that_is_full():
    model = language_model("encoder-decoder")
    inputs, config = inputs_for(model), model.config
    assert inputs["decoder_input_ids"].shape[1] == 5
    cache = EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=room) for room in (4, 12)))
    with pytest.raises(IndexError, match=r"room for 4 tokens.* 5 after 0 more"):
        model(**inputs, past_key_values=cache)
    decoder_input_ids = inputs.pop("decoder_input_ids")
    right = model(**inputs, decoder_input_ids=decoder_input_ids).logits
    for t in range(4):
        got = model(**inputs, decoder_input_ids=decoder_input_ids[:, t : t + 1], past_key_values=cache).logits
        close(got[:, 0], right[:, t])
    with pytest.raises(IndexError, match=r"room for 4 tokens.* 1 after 4 more"):
        model(**inputs, decoder_input_ids=decoder_input_ids[:, 4:], past_key_values=cache)


@compiles
@pytest.mark.parametrize("variant", ["student: groups", "lmu-isa + global attention", "spade hyena full"])
@torch.inference_mode()
def test_a_static_cache_that_is_full_in_compiled_steps(variant):
    """The count is a tensor there: the program ends with the same words, as transformers' own ends out of bounds."""
    model, ids = shallow_language_model(variant), text(2)
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + 3)
    model(ids[:, :PROMPT], past_key_values=cache)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    for t in range(PROMPT, PROMPT + 3):
        close(step(ids[:, t : t + 1], past_key_values=cache).logits[:, 0], model(ids[:, : t + 1]).logits[:, -1])
    with pytest.raises(RuntimeError, match=f"room for {PROMPT + 3} tokens"):
        step(ids[:, PROMPT + 3 : PROMPT + 4], past_key_values=cache)


@compiles
@pytest.mark.parametrize("variant", ["student: groups", "longhorn", "lmu-isa", "spade hyena full", "bst sh s4d"])
@torch.inference_mode()
def test_a_cache_in_a_program_of_any_batch(variant):
    """The batch is a symbol of the program after two of another number of rows, and the cache's is a number."""
    torch.compiler.reset()  # programs of other tests count towards torch's limit
    model = shallow_language_model(variant)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (3, 4):
        step(text(rows)[:, :1], use_cache=False)
    ids, cache = text(2), StaticCache(config=model.config, max_cache_len=PROMPT + 3)
    model(ids[:, :PROMPT], past_key_values=cache)
    got = step(ids[:, PROMPT : PROMPT + 1], past_key_values=cache).logits
    close(got[:, 0], model(ids[:, : PROMPT + 1]).logits[:, -1])


@pytest.mark.parametrize("masked", [False, True])
@torch.inference_mode()
def test_drafts_go_on_from_a_cache_that_was_given(model, masked):
    """transformers 5.24 reads the whole text after its beginning, which is in the cache."""
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    for assistance in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": language_model("longhorn")}):
        ids, cache = text(1, 20), DynamicCache(config=model.config)
        mask = torch.ones_like(ids)
        mask[:, :2] = 0 if masked else 1
        model(ids[:, :15], attention_mask=mask[:, :15], past_key_values=cache)
        longer = model.generate(ids, attention_mask=mask, past_key_values=cache, **assistance, **options)
        assert cache.get_seq_length() == longer.shape[1] - 1
        full = torch.cat([mask, torch.ones(1, 8, dtype=torch.long)], 1)
        close(model(longer[:, -1:], past_key_values=cache).logits, model(longer, attention_mask=full).logits[:, -1:])
    asked = {"return_dict_in_generate": True, "output_hidden_states": True}
    for given, columns, more, refusal in (
        (
            ids[:, :5],
            33,
            {},
            "from a cache of 27 tokens needs input_ids of the whole text and at least one more token, got 5",
        ),
        (longer[:, :-1], 27, {}, "at least one more token, got 27 tokens"),
        (longer, 28, asked, "returns no hidden states and attentions"),
    ):
        with pytest.raises(ValueError, match=refusal):
            cache = DynamicCache(config=model.config)
            model(longer[:, :-1], past_key_values=cache)
            model.generate(
                given, attention_mask=torch.ones(1, columns), past_key_values=cache, **assistance, **options, **more
            )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("removed", [1, 3, 8])
def test_rollback_into_a_forward_of_several_tokens(variant, removed):
    """What is recomputed is what the kept tokens alone leave behind: every state, and what windows see of it later."""
    model, ids = own_language_model(variant).double(), text(2, 21)
    went_back, straight = recording_cache(model), DynamicCache(config=model.config)
    with torch.inference_mode():
        for piece in ids.split([8, 7, 6], 1):
            model(piece, past_key_values=went_back)
        went_back.crop(-removed)
        model(ids[:, :8], past_key_values=straight)
        model(ids[:, 8 : 21 - removed], past_key_values=straight)
        for got, want in zip(went_back.layers, straight.layers):
            assert int(got.get_seq_length()) == int(want.get_seq_length()) == 21 - removed
            if is_recurrent_state_layer(got):
                torch.testing.assert_close(got.states, want.states, rtol=1e-9, atol=1e-9)
        tail = text(2, 14, seed=1)  # beyond every window
        torch.testing.assert_close(
            steps(model, went_back, tail), model(torch.cat([ids[:, : 21 - removed], tail], 1)).logits[:, -14:]
        )


@pytest.mark.parametrize("variant", ["longhorn", "bst mf unstructured", "lmu-isa", "spade s4 trained"])
def test_rollback_keeps_the_gradient_mode_of_what_it_reads_again(variant):
    """A forward with gradients is undone in part and keeps its graph; one without gets none."""
    model, ids = language_model(variant), text(1, 12)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(cache):
        loss = model(ids[:, 8:], past_key_values=cache).logits.square().sum()
        return torch.autograd.grad(loss, trained, allow_unused=True)

    straight, cropped, without = (DynamicCache(config=model.config) for _ in range(3))
    model(ids[:, :8], past_key_values=straight)
    cropped.activate_past_recording()
    model(ids[:, :10], past_key_values=cropped)
    cropped.crop(-2)
    for got, want in zip(gradients(cropped), gradients(straight)):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    without.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :10], past_key_values=without)
    without.crop(-2)
    held = [state for layer in without.layers for state in getattr(layer, "states", {}).values()]
    assert held and not any(state.requires_grad for state in held)


def test_a_graph_keeps_its_states():
    """Steps without gradients, after a forward with them, leave alone what its backward reads."""
    for variant in ("longhorn", "bst sh s4d", "spade s4 window"):
        model, ids, gradients = language_model(variant), text(1), []
        for decodes in (False, True):
            model.zero_grad()
            cache = DynamicCache(config=model.config)
            model(ids[:, :PROMPT], past_key_values=cache)
            loss = model(ids[:, PROMPT : PROMPT + 4], past_key_values=cache).logits.square().sum()
            if decodes:
                with torch.no_grad():
                    steps(model, cache, ids[:, PROMPT + 4 :])
            loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        for got, want in zip(*gradients):
            assert torch.equal(got, want)


def test_inference_mode_may_end():
    """States made in inference mode may not be written outside of it."""
    for variant in ("longhorn", "bst mf unstructured", "spade s4 window"):
        model, ids = language_model(variant), text(2)
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(ids[:, :PROMPT], past_key_values=cache)
            steps(model, cache, ids[:, PROMPT : PROMPT + 2])
        with torch.no_grad():
            close(steps(model, cache, ids[:, PROMPT + 2 :]), model(ids).logits[:, PROMPT + 2 :])


@pytest.mark.parametrize("variant", ["bst sh s4d", "spade s4 trained", "bst mf unstructured"])
def test_precomputed_constants_follow_the_weights(variant):
    """Discretised matrices and filters are made anew when their parameters were written, loaded or cast."""
    model, ids = own_language_model(variant), text(1)

    @torch.inference_mode()
    def check(model):
        cache = DynamicCache(config=model.config)
        model(ids[:, :PROMPT], past_key_values=cache)
        close(steps(model, cache, ids[:, PROMPT:]), model(ids).logits[:, PROMPT:])

    check(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ssm." in name:
                parameter.mul_(1.1)
    check(model)
    model.load_state_dict(language_model(variant).state_dict())
    check(model)
    check(model.double())


def test_states_that_nothing_recomputes_are_undone_as_a_whole():
    """As those that a file, a server's pages or another process gave; and one token, before which nothing is left."""
    layer = RecurrentStateLayer()
    layer.activate_past_recording()
    for length in (3, 1):
        layer.update_states(packed_rows(length=length), {"state": torch.full((2, 1), float(length))})
    with pytest.raises(RuntimeError, match="tokens_to_remove=-2 goes back into a forward of 3 tokens"):
        layer.crop(-2)
    # what could be undone was, and the rest is as it was
    assert layer.get_seq_length() == 3 and layer.states["state"].eq(3).all()
    layer.crop(-3)
    assert layer.get_seq_length() == 0 and not layer.states


def test_the_states_of_a_layer_are_asked_for_by_its_number(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text(2), past_key_values=cache)
    for index, layer in enumerate(cache.layers):
        if is_recurrent_state_layer(layer):
            assert state_layer(cache, index) is layer
        else:
            with pytest.raises(TypeError, match=f"layer {index} of cache is a DynamicLayer, which holds no recurrent"):
                state_layer(cache, index)
