"""What is done with models besides reading and writing texts, with a student of every kind of layer."""

import copy
import pickle

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

import hf_hybrid_ssm
from hf_hybrid_ssm.models.cache import prepare_cache
from hf_hybrid_ssm.models.cache_names import CACHE
from hf_hybrid_ssm.serving import PrefixCache, load_context, save_context
from hf_hybrid_ssm.serving.state_layout import hold_served
from hf_hybrid_ssm.students.initial import student_config
from tests.students.teachers import SIZES, student, tokens
from tests.tiny_models import compiles

KINDS = pytest.mark.parametrize("kind", ["constant", "first_token"])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


def close(found, wanted, atol=1e-12):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@KINDS
def test_copies_and_pickles_are_the_same_model(kind):
    model, ids = student("qwen3", kind), tokens(2, 20)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) and type(other.config) is type(model.config)
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_auto_classes_know_students(tmp_path):
    model, ids = student("qwen3", "constant"), tokens(2, 20)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    named = hf_hybrid_ssm.HybridStudentForCausalLM.from_pretrained(tmp_path)
    assert type(named) is type(model) and torch.equal(named(ids).logits, model(ids).logits)
    assert type(hf_hybrid_ssm.HybridStudentForCausalLM(model.config)) is type(model)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    close(eager(ids).logits, model(ids).logits, 1e-5)
    eager.set_attn_implementation("sdpa")
    assert torch.equal(eager(ids).logits, model(ids).logits)


@KINDS
def test_training_with_gradient_checkpointing_has_the_same_gradients(kind):
    gradients = []
    for checkpointing in (False, True):
        model, ids = copy.deepcopy(student("qwen3", kind)).train().requires_grad_(True), tokens(2, 20)
        if checkpointing:
            model.gradient_checkpointing_enable()
            with pytest.raises(ValueError, match="gradient checkpointing"):
                model(ids, cache=DynamicCache(config=model.config))
        model(ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert sum("sink" in name for name in gradients[0]) == (6 if kind == "constant" else 0)
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        close(gradients[1][name], gradient)


@KINDS
def test_a_student_as_an_assistant_goes_back(kind):
    model, ids = student("llama", kind), tokens(1, 12)
    other = student("llama", "first_token" if kind == "constant" else "constant")
    assert torch.equal(model.generate(ids, assistant_model=other, **GREEDY), model.generate(ids, **GREEDY))


@KINDS
def test_weights_may_wait_elsewhere(kind):
    model, ids = copy.deepcopy(student("qwen3", kind)), tokens(2, 20)
    cpu_offload(model, torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    wanted = student("qwen3", kind)
    close(model(ids).logits, wanted(ids).logits)
    assert torch.equal(model.generate(ids, **GREEDY), wanted.generate(ids, **GREEDY))


def test_peft_has_defaults():
    peft = pytest.importorskip("peft")
    model, ids = student("qwen3", "constant"), tokens(2, 20)
    for config in (peft.LoraConfig(), peft.IA3Config()):
        adapted = peft.get_peft_model(copy.deepcopy(model), config)
        close(adapted(ids).logits, model(ids).logits)
        assert adapted.get_nb_trainable_parameters()[0] > 0


@compiles
@KINDS
def test_compiles_into_one_graph(kind):
    """A prompt, and a token with a static cache."""
    torch._dynamo.reset()  # what other tests compiled counts against a limit
    model, ids = copy.deepcopy(student("qwen3", kind)), tokens(2, 20)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    close(compiled(ids, use_cache=False).logits, model(ids).logits)
    static, dynamic = StaticCache(config=model.config, max_cache_len=30), DynamicCache(config=model.config)
    for cache in (static, dynamic):
        model(ids, cache=cache)
    for place in (20, 21):
        token, position = ids[:, :1], torch.tensor([[place]])
        options = {"inputs_embeds": torch.empty(2, 1, 0, dtype=model.dtype), "position_ids": position}
        masks = model.create_masks_for_generate(model.config, attention_mask=None, **{CACHE: static}, **options)
        options = {"attention_mask": masks, "position_ids": position, "continues_documents": True}
        close(compiled(token, cache=static, **options).logits, model(token, cache=dynamic).logits)


def test_embeddings_and_the_caches_old_name():
    model, ids = student("qwen3", "constant"), tokens(2, 20)
    wanted = model(ids).logits
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, wanted)
    cache = model(ids[:, :9], use_cache=True).cache
    close(model(ids[:, 9:], past_key_values=cache).logits, wanted[:, 9:])


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"atention_mask": None}, TypeError, "no argument 'atention_mask'. Did you mean 'attention_mask'?"),
        ({"output_attentions": True}, ValueError, "output_attentions=True cannot be answered"),
        ({"attention_mask": torch.ones(2, 5)}, ValueError, "attention_mask must have shape"),
    ],
)
def test_what_has_no_effect_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        student("qwen3", "constant")(tokens(2, 20), **options)


def test_a_cache_of_another_model_is_refused():
    model, ids = student("qwen3", "constant"), tokens(2, 20)
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match="cache has layers"):
        student("qwen3", "windows")(ids, cache=cache)
    with pytest.raises(ValueError, match="batch of 2"):
        model(ids[:1], cache=cache)
    with pytest.raises(ValueError, match="continuous batching"):
        model.generate_batch([[1, 2]])


@KINDS
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_a_context_in_a_file_and_prefixes_that_are_kept(name, kind, tmp_path):
    model, ids, more = student(name, kind), tokens(1, 20), tokens(1, 4, seed=3)
    both = torch.cat([ids, more], 1)
    with torch.no_grad():
        save_context(model(ids, use_cache=True).cache, tmp_path / "context", model, tokens=ids)
        cache = load_context(tmp_path / "context", model).cache
        close(model(more, cache=cache).logits, model(both).logits[:, 20:])
    prefixes, wanted = PrefixCache(max_bytes=10**7), model.generate(both, **GREEDY)
    model.generate(ids, prefix_cache=prefixes, **GREEDY)
    assert torch.equal(model.generate(both, prefix_cache=prefixes, **GREEDY), wanted)


def test_a_server_may_keep_the_keys_of_all_tokens():
    """In layers that are the teacher's, and in those some of whose groups see all tokens."""
    model, ids = student("qwen3", "constant"), tokens(2, 20)
    asked = []

    def attend(queries, keys, values, *, scale):
        asked.append(keys.shape[1])
        keys, values = (x.repeat_interleave(queries.shape[1] // keys.shape[1], 1) for x in (keys, values))
        options = {"is_causal": True, "scale": scale}
        found = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, **options)
        return found.transpose(1, 2).flatten(2)

    cache = prepare_cache(None, model.config, 2)
    hold_served(cache, 0, attend, {}, torch.arange(2))
    hold_served(cache, 3, attend, {}, torch.arange(2))
    options = {"position_ids": torch.arange(20)[None], "continues_documents": True}
    with torch.no_grad():
        for layer in (1, 2):  # one column stands for what went before, and is not there
            cache.layers[layer].seen_tokens = 1
        cache.layers[0].states["window_seen"] = torch.zeros(2, dtype=torch.int64)
        states = {name: torch.zeros(2, 1, 5, 8, dtype=torch.float64) for name in ("window_keys", "window_values")}
        cache.layers[0].states |= states
        found = model(ids, cache=cache, **options).logits
    close(found, model(ids).logits)
    assert asked == [2, 2]


def test_weights_may_be_rounded(tmp_path):
    config = student_config(LlamaConfig(**SIZES | {"hidden_size": 128, "intermediate_size": 256}), keep=[1], window=5)
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), tokens(2, 20)
    model.save_pretrained(tmp_path)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=hf_hybrid_ssm.LowBitConfig(bits=8))
    assert type(rounded.model.layers[0].self_attn.q_proj).__name__ == "LowBitLinear"
    close(rounded(ids).logits, model(ids).logits, 0.1 * float(model(ids).logits.detach().abs().max()))


def test_attention_weights_where_all_layers_are_kept():
    model = copy.deepcopy(student("qwen3", "kept"))
    model.set_attn_implementation("eager")
    assert [weights.shape for weights in model(tokens(2, 9), output_attentions=True).attentions] == [(2, 4, 9, 9)] * 4
