"""Windows with constant sinks: the teacher itself within the window, its windowed self with that sink beyond."""

import copy

import pytest
import torch
from hf_hybrid_ssm.upcycle.sinks import first_tokens
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from hf_hybrid_ssm.upcycle import student_config, upcycle
from tests.tiny_models import compiles
from tests.upcycle.test_upcycle import LLAMA3, SIZES, TEACHERS, teacher_of, tokens

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
MADE_FROM = {name: {} for name in TEACHERS} | {"mistral": {"sliding_window": None}}
MADE_FROM |= {"llama 3, biases": {"rope_parameters": LLAMA3}, "qwen2": {"rope_parameters": YARN}}
REACH = 6  # keys before its own that a token sees
STUDENTS = {
    "bst": {"family": "bst", "sliding_window": REACH, "ssm_layers": [1]},
    "longhorn": {"others_as": "sliding_attention", "keep": [], "sliding_window": REACH + 1},
    "longhorn, two kept": {"others_as": "sliding_attention", "keep": [0, 2], "sliding_window": REACH + 1},
    "longhorn beside": {"others_as": "hybrid_sliding", "keep": [], "sliding_window": REACH + 1},
    "longhorn, groups kept": {"keep": [(0, 1), (2, 0), (2, 1), (3, 0)], "sliding_window": REACH + 1},
}


def first_tokens_states(teacher):
    """Keys and values (G, e) of each layer, the means over forwards of length one: what transformers' cache then
    holds, where keys are turned by nothing but have the scale of the rotation."""
    ids = torch.arange(SIZES["vocab_size"]).unsqueeze(1)  # fewer than a sink is made of
    cache = DynamicCache(config=teacher.config)
    teacher(ids, past_key_values=cache)
    scale = teacher.model.rotary_emb.attention_scaling
    return [(layer.keys[:, :, 0].mean(0) / scale, layer.values[:, :, 0].mean(0)) for layer in cache.layers]


def with_windows_and_sinks(teacher, window, kept=()):
    """The teacher, which sees `window` as of a student but in layers, or (layer, group), that are `kept`: softmax by
    its equation, a column for the sink.

    The teacher's queries are already turned by their positions; they are turned back, and by the window."""
    sinks, rotary = first_tokens_states(teacher), teacher.model.rotary_emb
    frequencies, scale, reach = rotary.inv_freq.double(), rotary.attention_scaling, REACH

    def attend(module, query, key, value, attention_mask, scaling, **options):
        length, shared = query.shape[2], query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
        rank = torch.arange(length)
        distance = rank[:, None] - rank
        layer = module.layer_idx
        heads = [layer in kept or (layer, head // shared) in kept for head in range(query.shape[1])]
        is_full = torch.tensor(heads)[:, None, None]
        passed = torch.where(is_full[..., 0], (rank + 1) // (window + 1), 0)
        logits = query * (1 + 0.1 * (1 + passed).log())[..., None] @ key.transpose(2, 3) * scaling
        seen = (distance >= 0) & (is_full | (distance <= reach))
        logits = logits.masked_fill(~seen, -torch.inf)
        sink, own = (x.repeat_interleave(shared, 0) for x in sinks[module.layer_idx])
        half = query.shape[3] // 2
        turn = torch.polar(torch.ones(()).double(), frequencies * (window - rank[:, None]))
        z = torch.complex(query[..., :half].double(), query[..., half:].double()) * turn
        turned = torch.cat([z.real, z.imag], -1).to(query.dtype)
        column = (turned * sink[:, None] * scale).sum(-1, keepdim=True) * scaling
        column = column.masked_fill(is_full | (rank <= reach)[:, None], -torch.inf)
        logits = torch.cat([logits, column], -1)
        value = torch.cat([value, own[:, None].expand(len(value), -1, 1, -1)], 2)
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("windows_and_sinks", attend)
    model = type(teacher)(copy.deepcopy(teacher.config)).to(teacher.dtype).eval()
    model.load_state_dict(teacher.state_dict())
    model.set_attn_implementation("windows_and_sinks")
    return model


def near(found, wanted):
    """To rounding: float32's is up to 1.5e-5 in these logits, of teachers as of students; in float64 it is that of the
    rotary tables, which transformers and we compute in float32."""
    tolerance = 1e-5 if found.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MADE_FROM)
@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@torch.no_grad()
def test_a_student_is_its_teacher_and_then_its_windowed_self(dtype, student, name):
    """At once, with padding, and with tokens one by one in both caches."""
    teacher = teacher_of(name, **MADE_FROM[name]).to(dtype)
    model, report = upcycle(teacher, **STUDENTS[student])
    assert model.config.attention_sink == "constant"
    kept = STUDENTS[student].get("keep", [])
    of_groups = [kind for kind in model.config.layer_types if kind == "hybrid_ssm_mixed_attention"]
    whole = 1 if of_groups else len(kept)  # both groups of one layer
    assert sum(part.endswith("sink.key") for part in report.new) == 4 - whole and len(of_groups) == 2 * bool(of_groups)
    windowed = with_windows_and_sinks(teacher, model.config.sliding_window, kept)
    for seed in range(3):
        ids = torch.randint(SIZES["vocab_size"], (2, 30), generator=torch.Generator().manual_seed(seed))
        wanted = windowed(ids).logits
        near(model(ids).logits, wanted)
        near(model(ids[:, : REACH + 1]).logits, teacher(ids[:, : REACH + 1]).logits)
        assert (wanted - teacher(ids).logits)[:, REACH + 2 :].abs().max() > 1e-2
        padded = torch.cat([torch.full((2, 5), 3), ids], 1)
        mask = torch.ones_like(padded)
        mask[:, :5] = 0
        near(model(padded, attention_mask=mask).logits[:, 5:], wanted)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=30)):
        found = [model(part, past_key_values=cache).logits for part in ids.split([11, *[1] * 19], 1)]
        near(torch.cat(found, 1), wanted)


@compiles
@pytest.mark.parametrize("student", ["bst", "longhorn beside", "longhorn, groups kept"])
@torch.no_grad()
def test_compiled_it_is_the_same(student):
    fields = STUDENTS[student] | ({"keep": [(0, 1), (1, 0)]} if student.endswith("groups kept") else {})
    model, _ = upcycle(teacher_of("llama", num_hidden_layers=2), **fields)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    near(compiled(tokens(), use_cache=False).logits, model(tokens()).logits)


# -- a teacher that rests on its first token, as pretrained ones do ---------------------------------------------------

BEGIN = 0


@torch.no_grad()
def resting_teacher():
    """Every head of it rests on the token that begins all texts: in the channel of a head that turns the least, its
    key alone is large, and so is every query; its value is almost nothing."""
    torch.manual_seed(0)
    fields = SIZES | {"bos_token_id": BEGIN, "eos_token_id": None, "tie_word_embeddings": False}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    model = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    begins, always, size = 0, 1, model.config.head_dim
    slowest = torch.arange(size // 2 - 1, SIZES["hidden_size"], size)  # of each head of queries
    embedding = model.model.embed_tokens.weight
    embedding[:, begins], embedding[:, always] = 0.0, 1.0
    embedding[BEGIN] = 4.0 * torch.eye(SIZES["hidden_size"])[begins]
    for layer in model.model.layers:
        attention, shared = layer.self_attn, slowest[: SIZES["num_key_value_heads"]]
        attention.q_proj.weight[slowest], attention.k_proj.weight[shared] = 0.0, 0.0
        attention.q_proj.weight[slowest, always], attention.k_proj.weight[shared, begins] = 6.0, 6.0
        attention.v_proj.weight[:, begins] = 0.0
        for projection in (attention.o_proj, layer.mlp.down_proj):
            projection.weight *= 0.3
            projection.weight[[begins, always]] = 0.0
    return model


class BeginningTokenizer:
    """Begins every text with one token, as Llama's does."""

    bos_token_id = BEGIN

    def __call__(self, text):
        return {"input_ids": [BEGIN, *(5 + ord(letter) % 80 for letter in text)]}


class ConversingTokenizer:
    """Begins no text with a token of its own, but conversations, as SmolLM2's does."""

    bos_token_id = BEGIN
    chat_template = "a user's message"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [BEGIN if letter == "^" else 5 + ord(letter) % 80 for letter in text]}

    def apply_chat_template(self, messages, tokenize):
        return "^" + messages[0]["content"]


class WritingTokenizer(ConversingTokenizer):
    """Begins neither."""

    chat_template = None


def test_a_sink_is_made_of_what_texts_begin_with():
    for tokenizer in (BeginningTokenizer(), ConversingTokenizer()):
        assert first_tokens(90, tokenizer, 0).tolist() == [[BEGIN]]
    for tokenizer in (WritingTokenizer(), None):
        assert sorted(first_tokens(90, tokenizer, 0)[:, 0].tolist()) == list(range(90))


@pytest.mark.parametrize("tokenizer", [BeginningTokenizer(), ConversingTokenizer()])
@pytest.mark.parametrize("student", ["bst", "longhorn"])
@torch.no_grad()
def test_beyond_its_window_a_student_needs_the_sink(student, tokenizer):
    """Of a teacher that puts most of its attention on the first token, windows alone make something else."""
    teacher = resting_teacher()
    ids = torch.randint(5, SIZES["vocab_size"], (8, 60), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([torch.full((8, 1), BEGIN), ids], 1)
    wanted = teacher(ids).logits.log_softmax(-1)
    fields = STUDENTS[student] | {"tokenizer": tokenizer}
    lost = {}
    for sink in ("constant", None):
        model, _ = upcycle(teacher, **fields, attention_sink=sink)
        found = model(ids).logits.log_softmax(-1)
        near(found[:, :REACH], wanted[:, :REACH])
        lost[sink] = float((wanted.exp() * (wanted - found)).sum(-1)[:, REACH + 1 :].mean())
    assert lost["constant"] < 0.02 and lost[None] > 1.0, lost


# -- where there is none, and refusals --------------------------------------------------------------------------------


def test_which_windows_have_a_sink():
    of = {name: teacher_of(name).config for name in ("llama", "mistral")}
    sliding = {"others_as": "sliding_attention"}
    assert student_config(of["llama"], **sliding).attention_sink == "constant"
    assert student_config(of["llama"], keep_as="sliding_attention").attention_sink == "constant"
    assert student_config(of["llama"], family="bst").attention_sink == "constant"
    assert student_config(of["llama"], family="bst", attention_sink=None).attention_sink is None
    assert student_config(of["llama"], keep=[(1, 0)]).attention_sink == "constant"
    assert student_config(of["llama"]).attention_sink is None  # no window
    assert student_config(of["mistral"], **sliding).attention_sink is None  # the teacher's own windows
    assert student_config(of["mistral"], family="bst").attention_sink is None
    with pytest.raises(ValueError, match='attention_sink="scalar" would change what the teacher computes'):
        student_config(of["llama"], family="bst", attention_sink="scalar")
