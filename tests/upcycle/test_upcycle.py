"""Students of many kinds of teachers: nothing of a teacher is lost, and what it cannot give is refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig

from hf_hybrid_ssm import upcycle as package
from hf_hybrid_ssm.upcycle import Keep, Teacher, choose_layers, upcycle
from hf_hybrid_ssm.upcycle.choice import evenly_spaced
from hf_hybrid_ssm.upcycle.student import config_of, constant_sinks, new_modules

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
HALF_SLIDES = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
# name → model type, and what is special
TEACHERS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama 3, biases": ("llama", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {**HALF_SLIDES, "head_dim": 8, "query_pre_attn_scalar": 16}),
    "granite": ("granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0, "embedding_multiplier": 3.0}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
}
EVERY = pytest.mark.parametrize("name", TEACHERS)
WINDOW = 5
MEMORIES = {
    "windows": {},
    "mixers beside": {"memory": "longhorn"},
    "mixers instead": {"memory": "longhorn", "instead": True, "state_size": 16},
    "context states": {"memory": "context", "ssm_state_size": 4},
}


def teacher_of(name: str, dtype: torch.dtype | None = None, **fields):
    """A model of transformers with random weights."""
    torch.manual_seed(0)
    model_type, own = TEACHERS[name]
    config = AutoConfig.for_model(model_type, **SIZES | own | fields)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model


def tokens(rows=2, length=30):
    return torch.randint(2, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))


def student_of(name="llama", parts=(), **options):
    """And its report; with the sinks that are asked for, untested."""
    given = {"sink": "constant"} | options
    return upcycle(Teacher(teacher_of(name)), Keep(list(parts), window=WINDOW), **given)


def test_the_public_face_is_small():
    assert len(package.__all__) <= 12


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_every_tensor_is_accounted_for(name, memory):
    teacher = Teacher(teacher_of(name))
    kept = teacher.layers[1]
    student, report = upcycle(teacher, Keep([kept], window=WINDOW), sink="constant", **MEMORIES[memory])
    weights, own = teacher.model.state_dict(), student.state_dict()
    assert sorted(report.copied + report.dropped) == sorted(weights)
    assert sorted(report.copied + report.new) == sorted(own)
    for tensor in report.copied:
        assert torch.equal(own[tensor], weights[tensor])
    for tensor in report.dropped:
        assert "self_attn" in tensor and f".{kept}." not in tensor
    assert bool(report.dropped) == (memory == "mixers instead")
    assert all(".sink." in tensor or ".memory." in tensor for tensor in report.new)
    assert bool(new_modules(student)) == (memory != "windows")
    assert bool(constant_sinks(student)) == (memory != "mixers instead")
    assert f"{len(report.copied)} tensors are the teacher's." in str(report)
    before = teacher_of(name).state_dict()
    assert all(torch.equal(value, before[tensor]) for tensor, value in weights.items())


def test_the_student_generates_as_its_teacher_was_told_to():
    teacher = teacher_of("llama")
    teacher.generation_config.update(do_sample=True, temperature=0.7, top_k=5, eos_token_id=[1, 5], max_new_tokens=9)
    student, _ = upcycle(Teacher(teacher), Keep([1], window=WINDOW))
    assert student.generation_config.to_dict() == teacher.generation_config.to_dict()
    student.generation_config.top_k = 6
    assert teacher.generation_config.top_k == 5


def test_tied_weights_stay_tied():
    student, _ = student_of("llama")
    assert student.lm_head.weight is student.model.embed_tokens.weight
    untied, _ = student_of("qwen3")
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "parts", "options", "scale"),
    [
        ("llama", [1], {}, 0.1),
        ("llama", [(1, 0)], {}, 0.1),
        ("llama", [], {}, 0.0),  # no attention to all tokens
        ("llama", [0, 1, 2, 3], {}, 0.0),  # no window
        ("llama", [1], {"sink": None}, 0.0),
        ("llama", [1], {"memory": "longhorn", "instead": True}, 0.0),
        ("llama", [1], {"attn_scale": 0.0}, 0.0),
        ("llama", [], {"attn_scale": 0.3}, 0.3),
        ("lfm2", [1], {}, 0.1),
        ("gemma3", [1], {}, 0.0),  # it has windows of its own: few of its layers see all tokens already
        ("gemma3", [1], {"attn_scale": 0.1}, 0.1),
    ],
)
def test_queries_that_see_all_tokens_are_sharper_beside_windows(name, parts, options, scale):
    """As in Llama 4, from the first token on that a window of the student does not show."""
    config = config_of(teacher_of(name).config, Keep(parts, window=WINDOW), **options)
    assert config.plan.attn_scale == scale and (scale == 0 or config.plan.floor_scale == WINDOW + 2)


def test_a_choice_is_its_window():
    teacher = Teacher(teacher_of("llama"))
    choice = choose_layers(teacher, Keep([1], window=7))
    student, report = upcycle(teacher, choice)
    assert choice.window == 7 and report.choice is choice
    assert [layer.window for layer in student.config.plan.layers] == [7, None, 7, 7]


def test_kept_layers_are_spaced_evenly():
    assert evenly_spaced(range(32), 8) == [2, 6, 10, 14, 18, 22, 26, 30]
    assert evenly_spaced(range(4), 1) == [2] and evenly_spaced(range(4), 0) == []
    assert evenly_spaced([5, 11, 17], 2) == [5, 17]


def test_refusals_name_what_is_wrong():
    teacher = Teacher(teacher_of("llama"))
    with pytest.raises(ValueError, match="init='zeros' must be one of 'projections', 'random'"):
        upcycle(teacher, init="zeros")
    for options, words in (
        ({"state_size": 4}, "state_size: of a memory, and there is none"),
        ({"memory": "longhorn", "hidden_size": 64}, "hidden_size of a memory must be its teacher's"),
        ({"memory": "longhorn", "stat_size": 4}, "LonghornConfig has no such field"),
        ({"memory": "context", "ssm_state_sise": 4}, "BstConfig has no such field"),
        ({"keep_by": "recall"}, "keep_by: of a memory, and there is none"),
    ):
        with pytest.raises(ValueError, match=words):
            upcycle(teacher, Keep(0), **options)
    with pytest.raises(ValueError, match="the teacher sees all tokens in the layers none"):
        Keep([1]).parts_of(MistralConfig(**SIZES, sliding_window=7))


def test_a_refusal_costs_no_ranking(monkeypatch):
    monkeypatch.setattr("hf_hybrid_ssm.upcycle.student.choose_layers", lambda *given: pytest.fail("ranked"))
    with pytest.raises(ValueError, match="state_size=-1"):
        upcycle(Teacher(teacher_of("llama")), Keep(1), memory="longhorn", state_size=-1)
