"""What is done with models besides reading and writing texts, with a student of every kind of layer."""

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

import hf_hybrid_ssm
from hf_hybrid_ssm.models.outputs import CACHE
from hf_hybrid_ssm.serving import PrefixCache, load_context, save_context
from tests import processes
from tests.serving.students import EVERY_STUDENT, student_model
from tests.students.teachers import student, tokens
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


@pytest.mark.filterwarnings("ignore:layers .* keep the keys")  # such a file grows with the text
@pytest.mark.parametrize("name", EVERY_STUDENT)
def test_contexts_in_files_and_prefixes_that_are_kept(name, tmp_path):
    """In this process and after a restart; of rows with padding, a context as well."""
    model, ids, more = student_model(name), tokens(1, 20), tokens(1, 4, seed=3)
    both, close_to = torch.cat([ids, more], 1), 1e-5
    rows, mask = torch.cat([ids, torch.zeros_like(ids)]), torch.ones(2, 20, dtype=torch.int64)
    rows[1, 7:], mask[1, :7] = ids[0, :13], 0
    with torch.no_grad():
        saved = model(rows, attention_mask=mask, use_cache=True).cache
        save_context(saved, tmp_path / "context", model, tokens=rows, attention_mask=mask)
        context = load_context(tmp_path / "context", model)
        assert torch.equal(context.tokens, rows) and torch.equal(context.attention_mask, mask)
        seen = torch.cat([mask, torch.ones(2, 4, dtype=torch.int64)], 1)
        found = model(more.expand(2, -1), cache=context.cache, attention_mask=seen).logits
        close(found[:1], model(both).logits[:, 20:], close_to)
        close(found[1:], model(torch.cat([ids[:, :13], more], 1)).logits[:, 13:], close_to)
    wanted = model.generate(both, **GREEDY)
    prefixes = PrefixCache(max_bytes=10**7, folder=tmp_path / "states")
    model.generate(ids, prefix_cache=prefixes, **GREEDY)
    for cache in (prefixes, PrefixCache(max_bytes=10**7, folder=tmp_path / "states")):
        read = cache.tokens_read
        assert torch.equal(model.generate(both, prefix_cache=cache, **GREEDY), wanted)
        assert cache.tokens_read - read < 20  # the prompt was read before


def test_a_context_of_another_plan_is_refused(tmp_path):
    one, other, ids = student("qwen3", "windows"), student("qwen3", "constant in all"), tokens(1, 9)
    save_context(one(ids, use_cache=True).cache, tmp_path / "context", one, tokens=ids)
    with pytest.raises(ValueError, match="student"):
        load_context(tmp_path / "context", other)


ROUNDED = """
import sys
import torch
from transformers import AutoModelForCausalLM, logging
from hf_hybrid_ssm import LowBitConfig
from tests.serving.students import student_model
from tests.students.teachers import tokens
logging.set_verbosity_error()
logging.disable_progress_bar()
folder, bits, *names = sys.argv[1:]
for name in names:
    model, ids = student_model(name, hidden_size=128, intermediate_size=256, head_dim=32), tokens(2, 20)
    model.save_pretrained(f"{folder}/exact")
    load = AutoModelForCausalLM.from_pretrained
    options = LowBitConfig(bits=int(bits), head_bits=int(bits))
    rounded = load(f"{folder}/exact", quantization_config=options).eval()
    rounded.save_pretrained(f"{folder}/rounded")
    again, info = load(f"{folder}/rounded", output_loading_info=True)
    assert not any(info.values()), info
    maps = [type(module).__name__ for module in again.modules()].count("LowBitLinear")
    with torch.no_grad():
        exact, found, same = (one(ids).logits for one in (model, rounded, again.eval()))
    scale = exact.abs().max()
    difference = float((found - exact).abs().max() / scale), float((same - found).abs().max() / scale)
    print(f"{name}: {maps}, {difference}", flush=True)
    assert maps > 16 and 0 < difference[0] < (0.5 if bits == "8" else 1.5) and difference[1] < 1e-5
print("done")
"""


@pytest.mark.parametrize("bits", ["8", "4"])
def test_a_folder_with_rounded_weights_gives_the_same(bits, tmp_path):
    """In a process of its own, which torch's kernels end where something does not suit them."""
    command = [sys.executable, "-c", ROUNDED, tmp_path, bits, *EVERY_STUDENT]
    told = processes.run(command, cwd=Path(__file__).parents[2], timeout=600)
    assert told.returncode == 0 and told.stdout.endswith("done\n"), (told.stdout, told.stderr[-2000:])


def test_attention_weights_where_all_layers_are_kept():
    model = copy.deepcopy(student("qwen3", "kept"))
    model.set_attn_implementation("eager")
    assert [weights.shape for weights in model(tokens(2, 9), output_attentions=True).attentions] == [(2, 4, 9, 9)] * 4
