"""What a student cannot get from its teacher is refused by name: nothing is left random or dropped in silence."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    Qwen2Config,
)

from hf_hybrid_ssm.upcycle import student_config, upcycle
from tests.upcycle.test_upcycle import SIZES, teacher_of, tokens

SCALED = ["model.layers.0.mlp.up_proj", "model.layers.2.self_attn.q_proj"]
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"])


def compiled():
    return torch.compile(teacher_of("llama"))


def compiled_inside():
    teacher = teacher_of("llama")
    teacher.model.layers[1] = torch.compile(teacher.model.layers[1])
    return teacher


def with_an_adapter():
    return inject_adapter_in_model(LORA, teacher_of("llama"))


def peft_model():
    return get_peft_model(teacher_of("llama"), LORA)


def fp8_beside_scales():
    teacher = teacher_of("llama")
    for name in SCALED:
        linear = teacher.get_submodule(name)
        scale = linear.weight.detach().abs().max() / 448
        linear.weight = torch.nn.Parameter((linear.weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        linear.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    return teacher


def fp8_alone():
    teacher = fp8_beside_scales()
    for name in SCALED:
        del teacher.get_submodule(name).weight_scale_inv
    return teacher


def dynamic_int8():
    return torch.ao.quantization.quantize_dynamic(teacher_of("llama"), {torch.nn.Linear}, dtype=torch.qint8)


def said_to_be_quantized():
    teacher = teacher_of("llama")
    teacher.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    return teacher


def tied_in_the_configuration_alone():
    teacher = teacher_of("llama", tie_word_embeddings=False)
    teacher.config.tie_word_embeddings = True
    return teacher


def without_head():
    return LlamaModel(LlamaConfig(**SIZES))


def classifier():
    return LlamaForSequenceClassification(LlamaConfig(**SIZES))


def another_width_than_configured():
    teacher = teacher_of("llama")
    teacher.config.intermediate_size = 50
    return teacher


def fewer_layers_than_configured():
    teacher = teacher_of("llama")
    del teacher.model.layers[3]
    return teacher


def of_two_types():
    teacher = teacher_of("llama")
    teacher.model.norm.double()
    return teacher


def offloaded():
    teacher = teacher_of("llama")
    teacher.model.layers[3].to("meta")
    return teacher


REFUSED = {
    compiled: r"_orig_mod\.\S+ of the teacher .*: torch\.compile",
    compiled_inside: r"model\.layers\.1\._orig_mod\.\S+ of the teacher .*: torch\.compile",
    with_an_adapter: r"q_proj\.base_layer\.weight of the teacher .*merge_and_unload",
    peft_model: r"q_proj\.base_layer\.weight of the teacher .*merge_and_unload",
    fp8_beside_scales: r"holds model\.layers\.0\.mlp\.up_proj\.weight_scale_inv, .*which no plain LlamaForCausalLM",
    fp8_alone: r"up_proj\.weight of the teacher is torch\.float8_e4m3fn",
    dynamic_int8: r"holds \S+\.q_proj\.scale, .* more, which no plain",
    said_to_be_quantized: r"quantization_config \(BitsAndBytesConfig\) of the teacher",
    tied_in_the_configuration_alone: r"tie_word_embeddings=True of the teacher, but lm_head\.weight is not",
    without_head: "teacher=LlamaModel cannot be upcycled; only a LlamaForCausalLM can",
    classifier: "teacher=LlamaForSequenceClassification cannot be upcycled; only a LlamaForCausalLM can",
    another_width_than_configured: r"mlp\.gate_proj\.weight of the teacher is \(48, 32\), not \(50, 32\)",
    fewer_layers_than_configured: r"lacks model\.layers\.3\.self_attn\.q_proj\.weight, .* and 6 more",
    of_two_types: r"are torch\.float32, torch\.float64; .* teacher\.to\(dtype\)",
    offloaded: r"model\.layers\.3\.\S+ of the teacher is offloaded",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao's
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_cannot_be_carried_is_refused(make):
    teacher = make()
    for arguments in ({"keep": 1.0}, {"keep": 0.0}, {"family": "bst"}):
        with pytest.raises(ValueError, match=REFUSED[make]) as error:
            upcycle(teacher, **arguments)
        assert "\n" not in str(error.value)


def test_what_the_refusals_advise_works():
    wanted = teacher_of("llama")(tokens()).logits
    for teacher in (compiled()._orig_mod, peft_model().merge_and_unload(), of_two_types().float()):
        torch.testing.assert_close(upcycle(teacher, keep=1.0)[0](tokens()).logits, wanted, atol=1e-5, rtol=1e-5)
    teacher = tied_in_the_configuration_alone()
    wanted = teacher(tokens()).logits
    teacher.config.tie_word_embeddings = False
    torch.testing.assert_close(upcycle(teacher, keep=1.0)[0](tokens()).logits, wanted, atol=1e-5, rtol=1e-5)


def test_what_is_not_a_model_is_a_type_error():
    for other in ("folder", LlamaConfig(**SIZES), torch.nn.Linear(2, 2), None):
        with pytest.raises(TypeError, match=f"not {type(other).__name__}"):
            upcycle(other)


def test_configurations_are_refused_without_weights():
    quantized = LlamaConfig(**SIZES, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"quantization_config \(fp8\) of the teacher"):
        student_config(quantized)
    unpacked = LlamaConfig(**SIZES, quantization_config={"quant_method": "gguf"})  # once loaded, its weights are plain
    assert student_config(unpacked).num_hidden_layers == SIZES["num_hidden_layers"]
    narrow = MistralConfig(**SIZES, sliding_window=1)
    with pytest.raises(ValueError, match=r"sliding_window=1 of the teacher: .* must be 2 or more"):
        student_config(narrow, family="bst")
    assert student_config(narrow, keep=1.0).sliding_window == 1  # theirs counts the token itself, and so does ours


WIDER = [
    ({"keep": [1, 2], "keep_as": "full_attention"}, "layer 1 of the student would see all tokens"),
    ({"block_types": ["full_attention", "sliding_attention"] * 2}, "layer 0 of the student would see all tokens"),
    ({"keep": [0], "others_as": "sliding_attention", "sliding_window": 8}, "Give at most 7, or leave it out"),
    ({"keep": [], "others_as": "hybrid_sliding", "sliding_window": 8}, "Give at most 7, or leave it out"),
    ({"family": "bst", "sliding_window": 7}, "Give at most 6, or leave it out"),
]


@pytest.mark.parametrize(("arguments", "message"), WIDER)
def test_no_layer_sees_more_than_its_teacher_was_trained_to(arguments, message):
    """Of a teacher whose layers slide, and of one of whose layers some do."""
    mixed = Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=0, sliding_window=7)
    assert mixed.layer_types == ["sliding_attention"] * 4
    for teacher in (MistralConfig(**SIZES, sliding_window=7), mixed):
        with pytest.raises(ValueError, match=message) as error:
            student_config(teacher, **arguments)
        assert "trained to see 7 tokens" in str(error.value) and "\n" not in str(error.value)
    half = Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=2, sliding_window=7)
    kept = student_config(half, keep=[0, 1], keep_as="full_attention", others_as="sliding_attention")
    assert kept.block_types == half.layer_types and kept.sliding_window == 7
    narrower = student_config(half, keep=[0, 1], others_as="sliding_attention", sliding_window=5)
    assert narrower.sliding_window == 5 and student_config(half, family="bst", sliding_window=6).sliding_window == 6


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_whose_frequencies_change_with_the_length_are_refused(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    config = LlamaConfig(**SIZES, rope_parameters=rope)
    for arguments in ({"keep": 1.0}, {"keep": 0.0, "others_as": "sliding_attention"}, {"family": "bst"}):
        with pytest.raises(ValueError, match=f"rope_type='{kind}' of the teacher cannot be carried over"):
            student_config(config, **arguments)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}  # what the refusal advises
    assert student_config(config, keep=1.0).rope_parameters["rope_type"] == "default"


OTHER_SIZES = {"num_key_value_heads": 4, "num_hidden_layers": 5, "mlp_intermediate_size": 50}
OTHER_PARTS = {"tie_word_embeddings": True, "attention_bias": True, "use_qk_norm": True}


@pytest.mark.parametrize(("field", "value"), (OTHER_SIZES | OTHER_PARTS).items())
def test_fields_that_the_weights_do_not_fit_are_refused(field, value):
    teacher = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match=f"{field} of a Longhorn must be its teacher's: {field}="):
        upcycle(teacher, keep=1.0, **{field: value})
    own = upcycle(teacher, keep=1.0)[0].config
    assert upcycle(teacher, keep=1.0, **{field: getattr(own, field)})[0].config == own
