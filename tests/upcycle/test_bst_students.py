"""Block-State Transformers of every teacher: its own numbers while context states are closed, windows as theirs."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_hybrid_ssm.upcycle import alignment_losses, init_context, new_modules, student_config, upcycle
from tests.upcycle.test_upcycle import SIZES, TEACHERS, teacher_of, tokens

VARIANTS = {"sh": {}, "mh": {"context_variant": "mh"}, "mf": {"context_variant": "mf", "num_context_states": 3}}
VARIANTS |= {"recurrent": {"block_types": ["block_recurrent", *["sliding_attention"] * 3], "recurrent_num_states": 3}}
KINDS = [*((name, "sh") for name in TEACHERS), *(("qwen3", variant) for variant in ("mh", "mf", "recurrent"))]


def without_window(name: str):
    return teacher_of(name, **({"sliding_window": None} if name == "mistral" else {}))


def student_of(teacher, variant="sh", **fields):
    chosen = {} if variant == "recurrent" else {"ssm_layers": [0, 2]}
    return upcycle(teacher, family="bst", **(chosen | VARIANTS[variant] | fields))


def assert_same_text(student, teacher):
    """Logits of a left-padded batch, and greedy text, which goes on in the cache."""
    inputs, mask = tokens(), torch.ones(2, 30, dtype=torch.long)
    mask[0, :9] = 0
    with torch.no_grad():
        found, wanted = (model(inputs, attention_mask=mask).logits for model in (student, teacher))
    torch.testing.assert_close(found[1], wanted[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[0, 9:], wanted[0, 9:], atol=1e-5, rtol=1e-5)
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    ours, theirs = (model.generate(inputs, **settings) for model in (student, teacher))
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "variant"), KINDS)
def test_with_windows_over_all_the_text_the_student_is_the_teacher(name, variant):
    teacher = without_window(name)
    student, report = student_of(teacher, variant, sliding_window=40)
    assert sorted(report.copied) == sorted(teacher.state_dict())
    assert not report.translated and not report.dropped
    assert_same_text(student, teacher)


@pytest.mark.parametrize("variant", VARIANTS)
def test_windows_are_those_of_transformers(variant):
    """Mistral's `sliding_window` counts the token itself, a BST's the tokens before it."""
    teacher = teacher_of("mistral")
    student, _ = student_of(teacher, variant)
    assert student.config.sliding_window == teacher.config.sliding_window - 1 == 6
    assert_same_text(student, teacher)


def test_a_window_changes_the_teacher_as_mistral_would():
    teacher = teacher_of("llama")
    window = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=10, tie_word_embeddings=True)).eval()
    window.load_state_dict(teacher.state_dict())
    student, _ = student_of(teacher, sliding_window=9, attention_sink=None)
    assert_same_text(student, window)
    assert (student(tokens()).logits - teacher(tokens()).logits)[:, :10].abs().max() < 1e-5
    assert (student(tokens()).logits - teacher(tokens()).logits)[:, 10:].abs().max() > 1e-2


def test_what_is_new_is_named():
    teacher = teacher_of("qwen2")
    student, report = student_of(teacher, ssm_layers=[3])
    inner = student.config.num_attention_heads * student.config.head_dim
    assert f"model.layers.3.attention.o_proj.weight[:, {inner}:] (zero)" in report.new
    assert "model.layers.0.attention.o_proj.bias" in report.new  # Qwen2 has none
    there = {name for name in report.new if ".layers.3.attention." in name}
    assert {name for name in report.new if "context" in name} < there
    assert new_modules(student) == [f"model.layers.3.attention.{n}" for n in ("context", "context_q_proj", "o_proj")]
    new = student_of(teacher, ssm_layers=[])[1].new
    parts = ("o_proj.bias", "sink.key", "sink.value")
    assert new == [f"model.layers.{index}.attention.{part}" for index in range(4) for part in parts]


def test_tied_weights_stay_tied_and_a_checkpoint_keeps_the_student(tmp_path):
    student, _ = student_of(teacher_of("llama"), sliding_window=5)
    assert student.lm_head.weight is student.model.embed_tokens.weight
    student.save_pretrained(tmp_path)
    again = type(student).from_pretrained(tmp_path)
    assert torch.equal(again(tokens()).logits, student(tokens()).logits)
    untied, _ = student_of(teacher_of("llama", tie_word_embeddings=False))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize("variant", ["sh", "mh", "mf"])
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@torch.no_grad()
def test_context_states_start_as_averages_read_like_tokens(variant, discretization):
    teacher = teacher_of("llama")
    student, _ = student_of(teacher, variant, sliding_window=8, ssm_discretization=discretization)
    block = student.model.layers[0]
    attention, context = block.attention, block.attention.context
    x = torch.randn(1, 1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).expand(1, 1500, -1)
    y, _ = context.ssm(context.input_norm(x))
    filters = {"sh": 1, "mh": 2, "mf": 3}[variant]
    averages = y.view(1500, filters, -1)
    torch.testing.assert_close(averages[-1], context.input_norm(x)[0, -1].expand(filters, -1), rtol=1e-4, atol=1e-4)
    lengths = [2 * 8] if filters == 1 else [8 * (64 ** (f / (filters - 1))) / 4 for f in range(filters)]
    for f, length in enumerate(lengths):  # to 1 - 1/e after as many tokens as the memory has
        share = (averages[round(length) - 1, f] / averages[-1, f]).mean()
        assert share == pytest.approx(1 - 0.3679 ** (round(length) / length), abs=0.05)
    keys, values = (part[0, -1].flatten(-2) for part in context._project(y[:, -1:]))
    z = block.attention_norm(x)[0, -1]
    for found, wanted in ((keys, attention.k_proj(z)), (values, attention.v_proj(z))):
        torch.testing.assert_close(found, wanted.expand_as(found), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(attention.context_q_proj.weight, attention.q_proj.weight)


@pytest.mark.parametrize("init", ["projections", "random"])
def test_alignment_opens_the_context_states(init):
    teacher = teacher_of("llama")
    torch.manual_seed(0)
    student, _ = student_of(teacher, sliding_window=4, init=init)
    losses = alignment_losses(student, teacher, input_ids=tokens(), labels=tokens())
    assert list(losses) == [0, 2] and min(losses.values()) > 1e-3
    torch.stack(list(losses.values())).sum().backward()
    moved = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert all(".attention." in name and name.split(".")[2] in "02" for name in moved)
    half = student.model.layers[0].attention.o_proj
    assert half.weight.grad[:, half.in_features // 2 :].abs().max() > 0
    assert student.model.layers[0].attention.context.k_proj.weight.grad.abs().max() == 0  # while it is closed
    parameters = [p for name, p in student.named_parameters() if name.startswith(tuple(new_modules(student)))]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        torch.stack(list(alignment_losses(student, teacher, input_ids=tokens()).values())).sum().backward()
        optimizer.step()
    after = alignment_losses(student, teacher, input_ids=tokens())
    assert all(after[index] < 0.9 * losses[index] for index in losses)
    assert student.model.layers[0].attention.context.k_proj.weight.grad.abs().max() > 0


def test_with_wide_windows_nothing_is_left_to_align():
    teacher = teacher_of("qwen3")
    student, _ = student_of(teacher, "mf", sliding_window=40)
    assert max(alignment_losses(student, teacher, input_ids=tokens()).values()) < 1e-10


def test_refusals_name_what_is_wrong():
    teacher = teacher_of("llama")
    with pytest.raises(ValueError, match="family='spade' must be one of 'longhorn', 'bst'"):
        upcycle(teacher, family="spade")
    with pytest.raises(ValueError, match=r"keep=0\.5, keep_as=None and others_as=None are for Longhorn"):
        upcycle(teacher, 0.5, family="bst")
    with pytest.raises(ValueError, match="num_key_value_heads, rope_parameters of a BST must be its teacher's"):
        student_config(teacher.config, family="bst", num_key_value_heads=4, rope_parameters=None)
    with pytest.raises(ValueError, match="mlp_bias=True"):
        upcycle(LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True)), family="bst")
    student, _ = student_of(teacher, ssm_layers=[1])
    with pytest.raises(ValueError, match="no context states"):
        init_context(student.model.layers[0].attention, student.model.layers[0].attention_norm)


def test_defaults_are_said_in_the_configuration():
    config = student_config(LlamaConfig(**SIZES | {"num_hidden_layers": 8}), family="bst")
    assert config.ssm_layers == [2, 6] and config.sliding_window == 512 and config.relative_attention_num_buckets == 32
    assert student_config(LlamaConfig(**SIZES | {"num_hidden_layers": 1}), family="bst").ssm_layers == [0]
