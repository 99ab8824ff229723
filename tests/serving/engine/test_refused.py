"""What the models do not do in vLLM is refused before anything is loaded, by name and value."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from tests.serving.engine.engines import folder_of, model_of
from tests.serving.students import student_model
from tests.tiny_models import own_language_model


def configured(folder, **options) -> VllmConfig:
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "skip_tokenizer_init": True}
    return EngineArgs(model=str(folder), **defaults | options).create_engine_config()


REFUSED = {
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not possible"),
    "tensor parallelism": ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not possible"),
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "speculative_config='ngram' is not possible",
    ),
    "LoRA": ({"enable_lora": True}, "enable_lora=True is not possible"),
    "quantization": ({"quantization": "fp8"}, "quantization='fp8' is not possible"),
    "prompt embeddings": ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True is not possible"),
    "states of all blocks": (
        {"enable_prefix_caching": True, "mamba_cache_mode": "all"},
        "mamba_cache_mode='all' is not possible|Input should be 'align' or 'none'",  # vLLM's own, from 0.32
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_refused(name):
    """Of vLLM, by name and with their value."""
    options, words = REFUSED[name]
    with pytest.raises(Exception, match=words):
        configured(folder_of("longhorn"), **options)


def test_experts_under_other_names_are_refused(tmp_path):
    from hf_hybrid_ssm.serving.vllm_model import PagedHybridForCausalLM

    student_model("student of experts", head_dim=32).save_pretrained(tmp_path)
    config = configured(tmp_path)
    with set_current_vllm_config(config):
        model = PagedHybridForCausalLM(vllm_config=config)
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    with pytest.raises(ValueError, match=f"{name}, .* does not have; .*: save it with save_original_format=False"):
        model.load_weights({name: torch.zeros(1)}.items())


def test_heads_of_a_size_without_a_kernel_are_refused(tmp_path):
    from hf_hybrid_ssm.serving.vllm_model import PagedHybridForCausalLM

    own_language_model("longhorn + full attention").save_pretrained(tmp_path)
    config = configured(tmp_path)
    with (
        set_current_vllm_config(config),
        pytest.raises(ValueError, match=r"layer 0 has full attention with heads of 6 channels, .* has 32, 64"),
    ):
        PagedHybridForCausalLM(vllm_config=config)


def test_weights_that_are_refused():
    """A tensor that is missing, foreign, or of another shape; all of them loaded is what transformers loads."""
    from hf_hybrid_ssm.serving.vllm_model import PagedHybridForCausalLM

    folder = folder_of("longhorn")
    config = configured(folder)
    with set_current_vllm_config(config):
        model = PagedHybridForCausalLM(vllm_config=config)
    expected = model_of(folder).state_dict()
    weights = {name: tensor for name, tensor in expected.items() if name != "lm_head.weight"}
    model.load_weights(weights.items())
    for name, tensor in model.inner.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    first = next(iter(weights))
    with pytest.raises(ValueError, match=f"the checkpoint lacks {first}"):
        model.load_weights(item for item in weights.items() if item[0] != first)
    with pytest.raises(ValueError, match="the checkpoint holds stranger, which LonghornForCausalLM does not have"):
        model.load_weights({**weights, "stranger": torch.zeros(1)}.items())
    with pytest.raises(ValueError, match=rf"{first} has shape \(3,\) in the checkpoint"):
        model.load_weights({first: torch.zeros(3)}.items())
