"""A cache of states by prefix: what it gives is what reading everything gives, and only what is new is read."""

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation import BaseStreamer

from hf_hybrid_ssm.serving import PrefixCache
from hf_hybrid_ssm.serving.prefix_cache import say_once
from tests.models.invariances import random_ids
from tests.tiny_models import VARIANTS, config_of, language_model, own_language_model
from tests.weight_changes import WAYS

# one of each family, and the one with transformers' own cache layer
SOME = ["longhorn + window and full attention", "bst block-recurrent", "lmu-isa", "spade s4 window"]
GREEDY = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
ANSWER = 6
VARIABLE = "HF_HYBRID_SSM_PREFIX_CACHE"


def in_float64(variant):
    return own_language_model(variant).double()


def answered(model, ids, cache=None, tokens=ANSWER, **options):
    given = {} if cache is None else {"prefix_cache": cache}
    return model.generate(ids, max_new_tokens=tokens, **GREEDY, **given, **options)


def check_same(model, ids, cache, **options) -> tuple[torch.Tensor, int]:
    """The text and its logits are those without the cache; returns the text and how many tokens were read."""
    before = cache.tokens_read
    found = answered(model, ids, cache, **options)
    read = cache.tokens_read - before
    expected = answered(model, ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-7, atol=1e-7)
    return found.sequences, read


# -- the same, with less to read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_conversation_reads_only_what_is_new(variant):
    model, cache = in_float64(variant), PrefixCache(every=8)
    text = random_ids(model, 1, 19)
    answer, read = check_same(model, text, cache)
    assert read == 19
    for turn in (1, 2):
        text = torch.cat([answer, random_ids(model, 1, 4, seed=turn)], 1)
        answer, read = check_same(model, text, cache, attention_mask=torch.ones_like(text))
        assert read == 5  # the last token of an answer has not been read when it ends
    assert cache.tokens_reused == 24 + 34


@pytest.mark.parametrize("variant", SOME)
def test_regenerating_and_editing_go_back_to_before_the_change(variant):
    model, cache = in_float64(variant), PrefixCache(every=8)
    first = random_ids(model, 1, 21)
    answer, _ = check_same(model, first, cache)
    assert check_same(model, first, cache)[1] == 1  # regenerated: all but the last token is there
    check_same(model, torch.cat([answer, random_ids(model, 1, 9, seed=1)], 1), cache)
    edited = torch.cat([first, random_ids(model, 1, 9, seed=2)], 1)
    assert check_same(model, edited, cache)[1] == 10
    inside = first.clone()
    inside[0, 13] = 3 + (inside[0, 13] - 2) % 50  # another token
    assert check_same(model, inside, cache)[1] == 21 - 8  # the last copy before it; the cut is remembered
    inside[0, 13] = 3 + (inside[0, 13] - 2) % 50
    assert check_same(model, inside, cache)[1] == 21 - 13


@pytest.mark.parametrize("variant", SOME)
def test_a_long_answer_that_is_cut_off_goes_on_from_within(variant):
    model, cache = in_float64(variant), PrefixCache(every=4)
    answer, _ = check_same(model, random_ids(model, 1, 6), cache, tokens=12)
    assert check_same(model, answer[:, :14], cache)[1] == 2


@pytest.mark.parametrize("variant", SOME)
def test_sampling_with_a_seed(variant):
    model, cache = in_float64(variant), PrefixCache()
    ids = random_ids(model, 1, 12)
    texts = []
    for given in ({}, {"prefix_cache": cache}, {"prefix_cache": cache}):
        torch.manual_seed(3)
        texts.append(model.generate(ids, max_new_tokens=8, do_sample=True, eos_token_id=None, **given))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("variant", SOME)
def test_a_text_of_one_token_and_options_of_generate(variant):
    model, cache = in_float64(variant), PrefixCache(every=3)
    check_same(model, random_ids(model, 1, 1), cache)
    ids = random_ids(model, 1, 11)
    check_same(model, ids, cache, repetition_penalty=1.3, no_repeat_ngram_size=2, prefill_chunk_size=None)
    check_same(model, ids, cache, tokenizer=SimpleNamespace())  # as transformers' server gives it, for stop strings
    assert check_same(model, ids, cache, attention_mask=torch.ones_like(ids), repetition_penalty=1.3)[1] == 1


# -- chat templates ---------------------------------------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# what comes before an answer is left out of earlier turns, as templates of thinking models do
THINKING = PLAIN.replace("<assistant>{% endif", "<assistant><think>{% endif")
# an answer loses its space in front, and so its tokens
TRIMMED = PLAIN.replace("m['content'] }}", "m['content'] | trim }}")


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("template", [PLAIN, THINKING, TRIMMED], ids=["plain", "thinking", "trimmed"])
def test_chat_templates(template, variant, byte_tokenizer):
    model, cache = in_float64(variant), PrefixCache(every=16)
    encode = byte_tokenizer(template)
    messages, lengths = [], []
    for turn in range(4):
        messages.append({"role": "user", "content": f"question {turn}, please"})
        ids = encode(messages)
        _, read = check_same(model, ids, cache)
        new = ids.shape[1] - (lengths[-1] if lengths else 0)
        # since the last prompt, and at most back to the copy before where its template differed
        assert read <= new + 16 and (turn > 0 or read == new)
        lengths.append(ids.shape[1])
        messages.append({"role": "assistant", "content": " an answer "})


@pytest.fixture
def byte_tokenizer():
    """Messages → ids, through the template of transformers and one token a letter."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def of(template):
        def encode(messages):
            (text,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True)
            return torch.tensor([[3 + ord(letter) % 57 for letter in text]])

        return encode

    return of


# -- whose states, and how many ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_changed_weights_read_the_text_anew(way):
    model, cache = own_language_model("longhorn").double(), PrefixCache()
    ids = random_ids(model, 1, 15)
    check_same(model, ids, cache)
    names = dict(model.model.named_parameters())
    name = next(name for name, value in names.items() if name.startswith("layers.0.") and value.dim() == 2)
    with torch.no_grad():
        WAYS[way](model.model, {name: names[name].detach() * 1.5})
    assert check_same(model, ids, cache)[1] == 15
    assert check_same(model, ids, cache)[1] == 1


# -- what nothing says of a model, and what only a whole reading gives ------------------------------------------------


def by_hook(model):
    model.get_decoder().layers[0].register_forward_hook(lambda module, inputs, output: -2 * output)


def by_forward(model):
    first, forward = model.get_decoder().layers[0], model.get_decoder().layers[0].forward
    first.forward = lambda *args, **kwargs: -2 * forward(*args, **kwargs)


ASIDE = {
    "a forward hook of model.layers.0 may change states": by_hook,
    "another forward of model.layers.0 may change states": by_forward,
    "the model is in training mode": lambda model: model.get_decoder().norm.train(),  # of one module
}


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("reason", ASIDE)
def test_it_steps_aside_and_says_so_once(reason, variant, caplog, monkeypatch):
    """Given to a call, and where the process has one. Nothing of the call is kept, and nothing of before is taken."""
    say_once.cache_clear()
    model, cache = in_float64(variant), PrefixCache(every=4)
    ids = random_ids(model, 1, 15)
    before = check_same(model, ids, cache)[0]
    ASIDE[reason](model)
    held = len(cache)
    for _ in range(2):
        after, read = check_same(model, ids, cache)
        assert read == 0 and len(cache) == held
        monkeypatch.setenv(VARIABLE, "20000000")
        answered(model, ids)
        monkeypatch.delenv(VARIABLE)
    assert torch.equal(after, before) == ("training" in reason)
    assert [reason in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("variant", [*SOME, "student: groups"])
def test_hidden_states_are_those_of_all_tokens(variant, caplog):
    say_once.cache_clear()
    model, cache = in_float64(variant), PrefixCache(every=4)
    ids = random_ids(model, 1, 15)
    check_same(model, ids, cache)
    outputs = [answered(model, ids, given, output_hidden_states=True) for given in (cache, None)]
    for found, expected in zip(outputs[0].hidden_states, outputs[1].hidden_states, strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert outputs[0].hidden_states[0][-1].shape[1] == 15
    assert "output_hidden_states=True is of all tokens" in caplog.text
    assert check_same(model, ids, cache)[1] == 1  # transformers' hooks stay behind, and are known


def test_attention_weights_are_those_of_all_tokens():
    config = config_of("longhorn + full attention", layer_types=["full_attention"] * 3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids, cache = random_ids(model, 1, 9), PrefixCache()
    for _ in range(2):
        weights = answered(model, ids, cache, output_attentions=True).attentions[0][0]
        assert weights.shape[-2:] == (9, 9)


def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft")
    model = own_language_model("longhorn")
    wrapped = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="virtual tokens"):
        wrapped.generate(input_ids=random_ids(model, 1, 5), prefix_cache=PrefixCache(), max_new_tokens=2)


def storages(cache) -> dict[int, int]:
    """Address → bytes of all memory that the copies hold."""
    held = {}
    for snapshot in cache._snapshots.values():
        layers = snapshot.cache.layers
        inner = [value for layer in layers for value in vars(layer).values()]
        inner += [tensor for value in inner if isinstance(value, dict) for tensor in value.values()]
        for tensor in (snapshot.tokens, *(value for value in inner if isinstance(value, torch.Tensor))):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return held


@pytest.mark.parametrize("variant", SOME)
def test_it_holds_what_it_says_and_stays_within_its_bytes(variant):
    model, cache = in_float64(variant), PrefixCache(every=4)
    ids = random_ids(model, 1, 24)
    answered(model, ids, cache)
    assert cache.num_bytes == sum(storages(cache).values()) and len(cache) == 9  # after 4, ..., 20, 23, 24, 28, 29
    bound = cache.num_bytes // 2
    small = PrefixCache(bound, every=4)
    for seed in range(3):
        check_same(model, random_ids(model, 1, 24, seed=seed), small)
        assert 0 < small.num_bytes <= bound and small.num_bytes == sum(storages(small).values())
    too_small = PrefixCache(1)
    assert check_same(model, ids, too_small)[1] == 24 == check_same(model, ids, too_small)[1]
    assert len(too_small) == 0 == too_small.num_bytes


def test_what_is_held_beside_tensors_ends_at_the_bound(tmp_path):
    """Of many texts, also in a folder: the bound is reached soon, and after that no object is left behind."""
    model, counts = in_float64("longhorn"), []
    cache = PrefixCache(60_000, folder=tmp_path, max_folder_bytes=60_000)
    for seed in range(48):
        answered(model, random_ids(model, 1, 9, seed=seed), cache, tokens=2)
        if seed % 16 == 15:
            gc.collect()
            counts.append(len(gc.get_objects()))
            assert 45_000 < cache.num_bytes <= 60_000
    assert counts[2] - counts[1] < 16, counts  # less than one for each text


def test_the_least_recently_used_goes_first():
    model = in_float64("longhorn")
    one, two, three = (random_ids(model, 1, 9, seed=seed) for seed in range(3))
    measure = PrefixCache()
    answered(model, one, measure, tokens=1)  # of one token: a copy of its prompt, which is that of the answer too
    cache = PrefixCache(2 * measure.num_bytes)
    for ids, read in ((one, 9), (two, 9), (one, 1), (three, 9), (one, 1), (two, 9)):
        assert check_same(model, ids, cache, tokens=1)[1] == read


@pytest.mark.parametrize("variant", SOME)
def test_what_is_returned_is_the_callers_own(variant):
    model, cache = in_float64(variant), PrefixCache()
    ids = random_ids(model, 1, 12)
    output = answered(model, ids, cache)
    before = [tensor.clone() for snapshot in cache._snapshots.values() for tensor in of_layers(snapshot.cache)]
    with torch.no_grad():
        for tensor in of_layers(output.past_key_values):
            tensor.fill_(7)
    after = [tensor for snapshot in cache._snapshots.values() for tensor in of_layers(snapshot.cache)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert check_same(model, ids, cache)[1] == 1


def of_layers(cache) -> list[torch.Tensor]:
    """Its states, or its keys and values."""
    return [
        value
        for layer in cache.layers
        for value in (layer.states.values() if hasattr(layer, "states") else (layer.keys, layer.values))
    ]


@pytest.mark.parametrize("variant", SOME)
def test_an_answer_that_breaks_off_leaves_nothing_wrong(variant):
    class Breaking(BaseStreamer):
        left = 4

        def put(self, value):
            self.left -= 1
            if not self.left:
                raise ConnectionError("the client has gone")

        def end(self):
            pass

    model, cache = in_float64(variant), PrefixCache(every=5)
    ids = random_ids(model, 1, 12)
    with pytest.raises(ConnectionError):
        answered(model, ids, cache, streamer=Breaking())
    assert check_same(model, ids, cache)[1] == 1


def test_threads_share_one():
    model, cache = in_float64("longhorn"), PrefixCache(200_000, every=4)
    texts = [random_ids(model, 1, 18, seed=seed) for seed in range(3)]
    expected = [answered(model, ids).sequences for ids in texts]
    failed = []

    def work(index):
        for turn in range(4):
            found = answered(model, texts[(index + turn) % 3], cache).sequences
            if not torch.equal(found, expected[(index + turn) % 3]):
                failed.append((index, turn))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and cache.tokens_read + cache.tokens_reused == 16 * 18
    assert cache.num_bytes == sum(storages(cache).values()) <= 200_000


@pytest.mark.parametrize("variant", SOME)
def test_in_and_out_of_inference_mode(variant):
    model, cache = in_float64(variant), PrefixCache()
    ids = random_ids(model, 1, 12)
    with torch.inference_mode():
        check_same(model, ids, cache)
    assert check_same(model, ids, cache)[1] == 1


# -- what it does not serve -------------------------------------------------------------------------------------------

REFUSED = {
    "num_beams=2": {"num_beams": 2},
    "num_return_sequences=2": {"num_return_sequences": 2, "do_sample": True},
    "use_cache=False": {"use_cache": False},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "prompt_lookup_num_tokens=2": {"prompt_lookup_num_tokens": 2},
    "penalty_alpha=0.6": {"penalty_alpha": 0.6, "top_k": 4},
    "assistant_model=SimpleNamespace": {"assistant_model": SimpleNamespace()},
    "position_ids does not": {"position_ids": torch.arange(8)[None]},
    "seq_idx does not": {"seq_idx": torch.zeros(1, 8, dtype=torch.int32)},
    "attention_mask must": {"attention_mask": torch.tensor([[0] + [1] * 7])},
    "input_ids holds pad_token_id=0": {"input_ids": torch.tensor([[5, 0, 5]])},
    "input_ids has 2 rows": {"input_ids": torch.full((2, 8), 5)},
    "there are no input_ids": {"input_ids": None},
}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("by_configuration", [False, True])
def test_what_it_cannot_serve_is_refused_by_name(message, by_configuration):
    model, options = own_language_model("longhorn"), dict(REFUSED[message])
    ids = options.pop("input_ids", random_ids(model, 1, 8))
    if by_configuration:
        for name in [name for name in options if hasattr(model.generation_config, name)]:
            setattr(model.generation_config, name, options.pop(name))
    with pytest.raises(ValueError, match=f"prefix_cache: {message}"):
        model.generate(ids, prefix_cache=PrefixCache(), max_new_tokens=2, **options)


def test_a_cache_of_the_callers_own_is_refused():
    model = language_model("longhorn")
    with pytest.raises(ValueError, match="cache does not go with it"):
        cache = DynamicCache(config=model.config)
        model.generate(random_ids(model, 1, 8), prefix_cache=PrefixCache(), cache=cache)


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"max_bytes": 1.5}, {"every": 0}, {"every": True}, {"max_folder_bytes": 0}]
)
def test_bad_arguments(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* must be a positive whole number"):
        PrefixCache(**options)
    with pytest.raises(TypeError, match="prefix_cache must be a PrefixCache, got dict"):
        language_model("longhorn").generate(torch.ones(1, 3, dtype=torch.long), prefix_cache={})


# -- of a process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", SOME)
def test_a_server_needs_no_argument(variant, monkeypatch):
    from hf_hybrid_ssm.serving.prefix_cache import of_process

    model = in_float64(variant)
    ids = random_ids(model, 2, 12)
    assert of_process() is None
    monkeypatch.setenv(VARIABLE, "20000000")
    shared = of_process()
    shared.clear()
    before = shared.tokens_read
    for _ in range(2):
        answered(model, ids[:1])
    assert shared is of_process() and shared.tokens_read - before == 13
    answered(model, ids)  # two rows: as ever
    answered(model, ids[:1], num_beams=2)
    assert shared.tokens_read - before == 13
    shared.clear()


def test_a_wrong_size_is_named(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1GB")
    with pytest.raises(ValueError, match="HF_HYBRID_SSM_PREFIX_CACHE='1GB' must be a number of bytes"):
        answered(language_model("longhorn"), torch.full((1, 4), 5))
