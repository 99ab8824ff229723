"""Students of every teacher: exact where attention stays, a first-order expansion where it goes, refused by name."""

import math

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_hybrid_ssm.upcycle import (
    alignment_losses,
    attention_sensitivity,
    distillation_loss,
    evenly_spaced,
    student_config,
    upcycle,
)
from hf_hybrid_ssm.upcycle.projections import score_factors

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
TEACHERS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama 3, biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "rope_parameters": LLAMA3}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}


def teacher_of(name: str, **fields):
    torch.manual_seed(0)
    config, model_class, own = TEACHERS[name]
    model = model_class(config(**SIZES | own | fields)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model


def tokens(rows=2, length=30):
    return torch.randint(SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TEACHERS)
def test_with_all_attention_kept_the_student_is_the_teacher(name):
    teacher = teacher_of(name)
    student, report = upcycle(teacher, keep=1.0)
    assert not report.translated and not report.dropped
    inputs, mask = tokens(), torch.ones(2, 30, dtype=torch.long)
    mask[0, :9] = 0  # left padding
    found = student(inputs, attention_mask=mask).logits
    wanted = teacher(inputs, attention_mask=mask).logits
    torch.testing.assert_close(found[1], wanted[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[0, 9:], wanted[0, 9:], atol=1e-5, rtol=1e-5)
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    assert torch.equal(student.generate(inputs, **settings), teacher.generate(inputs, **settings))


@pytest.mark.parametrize("name", TEACHERS)
def test_every_weight_is_accounted_for(name):
    teacher = teacher_of(name)
    student, report = upcycle(teacher, keep=[1])
    assert sorted(report.copied + report.translated + report.dropped) == sorted(teacher.state_dict())
    kept = "sliding_attention" if name == "mistral" else "full_attention"
    assert student.config.block_types == ["linear_attention", kept, "linear_attention", "linear_attention"]
    for unused in report.dropped:
        assert "self_attn" in unused and ".1." not in unused
    assert ("translated: " in str(report)) == bool(report.translated)


@pytest.mark.parametrize("family", ["longhorn", "bst"])
def test_the_student_generates_as_its_teacher_was_told_to(family):
    teacher = teacher_of("llama")
    teacher.generation_config.update(do_sample=True, temperature=0.7, top_k=5, eos_token_id=[1, 5], max_new_tokens=9)
    student, _ = upcycle(teacher, family=family)
    assert student.generation_config.to_dict() == teacher.generation_config.to_dict()
    student.generation_config.top_k = 6
    assert teacher.generation_config.top_k == 5


def test_tied_weights_stay_tied(tmp_path):
    student, _ = upcycle(teacher_of("llama"), keep=0.5)
    assert student.lm_head.weight is student.model.embed_tokens.weight
    untied, _ = upcycle(teacher_of("qwen3", tie_word_embeddings=False), keep=0.5)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    student.save_pretrained(tmp_path)
    again = type(student).from_pretrained(tmp_path)
    assert torch.equal(again(tokens()).logits, student(tokens()).logits)


@pytest.mark.parametrize("name", ["llama", "llama 3, biases", "qwen2", "qwen3"])
def test_a_new_mixer_is_nearer_to_the_attention_than_a_random_one(name):
    teacher = teacher_of(name)
    losses = {}
    for init in ("projections", "random"):
        torch.manual_seed(2)
        student, _ = upcycle(teacher, keep=0.0, init=init, state_size=16)
        losses[init] = alignment_losses(student, teacher, input_ids=tokens(), labels=tokens())
    assert list(losses["projections"]) == [0, 1, 2, 3]
    for index, loss in losses["projections"].items():
        assert loss < 0.95 < losses["random"][index]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_values_pass_a_new_mixer_as_they_are(name):
    """silu(v) - silu(-v) = v: with one token, the mixer's output is that of attention, scaled by Δc²(1 + q · k).

    Qwen2's values have a bias, which both channels of a pair need."""
    teacher = teacher_of(name)  # grouped heads: there are channels to spare
    assert (teacher.model.layers[0].self_attn.v_proj.bias is not None) == (name == "qwen2")
    student, _ = upcycle(teacher, keep=0.0, state_size=16)
    layer, mixer = teacher.model.layers[0], student.model.layers[0].mixer
    hidden = torch.randn(64, 1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))
    positions = teacher.model.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.long))
    wanted, _ = layer.self_attn(hidden, positions, attention_mask=None)
    found = mixer(hidden)
    cosine = torch.nn.functional.cosine_similarity(found.squeeze(1), wanted.squeeze(1), dim=-1)
    torch.testing.assert_close(cosine.abs(), torch.ones(64), atol=1e-5, rtol=0)


@torch.no_grad()
def test_scores_are_fitted_by_their_leading_directions():
    attention = teacher_of("llama").model.layers[0].self_attn
    queries, keys = (layer.weight.double().view(-1, 8, 32) for layer in (attention.q_proj, attention.k_proj))
    wanted = sum(queries[head].T @ keys[head // 2] for head in range(4)) / (4 * math.sqrt(8))
    left, right = score_factors(attention, 32)
    torch.testing.assert_close(left.T @ right, wanted, atol=1e-10, rtol=0)
    singular = torch.linalg.svdvals(wanted)
    for rank in (2, 8, 16):
        left, right = score_factors(attention, rank)
        torch.testing.assert_close((wanted - left.T @ right).norm(), singular[rank:].norm(), atol=1e-10, rtol=0)


def test_alignment_teaches_the_mixers_alone():
    teacher = teacher_of("llama")
    student, _ = upcycle(teacher, keep=[0])
    losses = alignment_losses(student, teacher, input_ids=tokens())
    torch.stack(list(losses.values())).sum().backward()
    moved = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert moved and all(".mixer." in name for name in moved)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    optimizer = torch.optim.Adam([parameter for parameter in student.parameters() if parameter.grad is not None], 3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        torch.stack(list(alignment_losses(student, teacher, input_ids=tokens()).values())).sum().backward()
        optimizer.step()
    after = alignment_losses(student, teacher, input_ids=tokens())
    assert all(after[index] < 0.8 * losses[index] for index in losses)


def test_distillation_is_the_divergence():
    ours, theirs = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    p, q = (torch.softmax(part / 2, -1) for part in (theirs, ours))
    wanted = 4 * (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(distillation_loss(ours, theirs, 2.0).double(), wanted, atol=1e-5, rtol=0)
    assert distillation_loss(ours, ours).abs() < 1e-6
    with pytest.raises(ValueError, match=r"student_logits \(3, 5, 11\)"):
        distillation_loss(ours, theirs[:2])
    with pytest.raises(ValueError, match="temperature=0"):
        distillation_loss(ours, theirs, 0)


def test_sensitivity_is_the_loss_without_a_layers_attention():
    teacher = teacher_of("llama")
    with torch.no_grad():
        teacher.model.layers[2].self_attn.o_proj.weight.zero_()  # adds nothing already
    rises = attention_sensitivity(teacher, [{"input_ids": tokens()}])
    assert len(rises) == 4 and rises[2] == 0 and max(map(abs, rises)) > 1e-3
    with torch.no_grad():
        whole = teacher(tokens(), labels=tokens()).loss
        teacher.model.layers[1].self_attn.o_proj.weight.zero_()
        without = teacher(tokens(), labels=tokens()).loss
    assert math.isclose(rises[1], float(without - whole), abs_tol=1e-6)
    with pytest.raises(ValueError, match="batches is empty"):
        attention_sensitivity(teacher, [])


def test_kept_layers_are_spaced_evenly():
    assert evenly_spaced(32, 8) == [2, 6, 10, 14, 18, 22, 26, 30]
    assert evenly_spaced(4, 1) == [2] and evenly_spaced(4, 0) == [] and evenly_spaced(3, 3) == [0, 1, 2]


def test_a_students_length_is_its_teachers_where_something_is_bound_to_it():
    """Whole attention, or scaled rotary positions; windows and states end nowhere. What was asked for stays."""
    plain, scaled = TEACHERS["llama"][0](**SIZES), TEACHERS["llama 3, biases"][0](**SIZES, rope_parameters=LLAMA3)
    for family, fields in (("bst", {}), ("longhorn", {"keep": 0.0}), ("longhorn", {"keep_as": "sliding_attention"})):
        assert not hasattr(student_config(plain, family=family, **fields), "max_position_embeddings")
        asked = student_config(plain, family=family, max_position_embeddings=77, **fields)
        assert asked.max_position_embeddings == 77
    assert student_config(plain, keep=[1]).max_position_embeddings == 128
    assert student_config(scaled, family="bst").max_position_embeddings == 128


def test_refusals_name_what_is_wrong():
    teacher = teacher_of("llama")
    with pytest.raises(ValueError, match=r"keep=1\.5 must be a share"):
        student_config(teacher.config, 1.5)
    with pytest.raises(ValueError, match=r"names \[4\], but the teacher's layers are 0 to 3"):
        student_config(teacher.config, [0, 4])
    with pytest.raises(ValueError, match="keep_as='chunk'"):
        student_config(teacher.config, 0.5, "chunk")
    with pytest.raises(ValueError, match="init='zeros'"):
        upcycle(teacher, init="zeros")
    with pytest.raises(ValueError, match="use_bias=False"):
        upcycle(teacher, use_bias=False)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11))
    with pytest.raises(ValueError, match="'gpt2' cannot be upcycled: learned positions"):
        upcycle(gpt2)
    with pytest.raises(ValueError, match="hidden_act='gelu' of the teacher"):
        student_config(LlamaConfig(**SIZES, hidden_act="gelu"))
    wide = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, head_dim=12))
    with pytest.raises(ValueError, match="48 channels, which need 96"):
        upcycle(wide, keep=0.0)
