"""What a student cannot get from its teacher is refused by name: nothing is left random or dropped in silence."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForSequenceClassification, LlamaModel

from hf_hybrid_ssm.upcycle import Keep, Teacher, upcycle
from hf_hybrid_ssm.upcycle.teacher import check_config
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
    tied_in_the_configuration_alone: "tie_word_embeddings=True of the teacher, but the weights of its embeddings and",
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
    with pytest.raises(ValueError, match=REFUSED[make]) as error:
        Teacher(make())
    assert "\n" not in str(error.value)


def test_what_the_refusals_advise_works():
    wanted = teacher_of("llama")(tokens()).logits
    for teacher in (compiled()._orig_mod, peft_model().merge_and_unload(), of_two_types().float()):
        torch.testing.assert_close(
            upcycle(Teacher(teacher), Keep(1.0))[0](tokens()).logits, wanted, atol=1e-5, rtol=1e-5
        )
    teacher = tied_in_the_configuration_alone()
    wanted = teacher(tokens()).logits
    teacher.config.tie_word_embeddings = False
    torch.testing.assert_close(upcycle(Teacher(teacher), Keep(1.0))[0](tokens()).logits, wanted, atol=1e-5, rtol=1e-5)


def test_what_is_not_a_model_is_a_type_error():
    for other in ("folder", LlamaConfig(**SIZES), torch.nn.Linear(2, 2), None):
        with pytest.raises(TypeError, match=f"not {type(other).__name__}"):
            Teacher(other)


def test_configurations_are_refused_without_weights():
    quantized = LlamaConfig(**SIZES, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"quantization_config \(fp8\) of the teacher .*dequantize"):
        check_config(quantized)
    check_config(LlamaConfig(**SIZES, quantization_config={"quant_method": "gguf"}))  # plain, once it is loaded
