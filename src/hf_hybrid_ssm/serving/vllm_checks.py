"""What the models of this package do not do in vLLM, refused before an engine starts."""

from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.models.config import MambaModelConfig

from hf_hybrid_ssm.models import family_of
from hf_hybrid_ssm.serving.paged_states import check_continues, check_pageable
from hf_hybrid_ssm.serving.state_layout import StateLayout, layout_without_running


class PagedHybridConfig(MambaModelConfig):
    """vLLM's settings of models with states, for ours."""

    @classmethod
    def verify_and_update_model_config(cls, model_config: Any) -> None:
        """To vLLM a class of models has attention or has none; ours have it where their configuration says so."""
        if check_model(model_config.hf_config).attention:
            own = {"is_attention_free": False, "is_hybrid": True}
            model_config._model_info = replace(model_config._model_info, **own)

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        check_settings(vllm_config)
        super().verify_and_update_config(vllm_config)


def check_settings(vllm_config: Any) -> None:
    """
    Raises:
        ValueError: names the option of vLLM that these models do not have, and its value.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            _refuse(name, size, "a page holds the states of whole layers; start several engines instead")
    if vllm_config.speculative_config is not None:
        method = vllm_config.speculative_config.method
        _refuse("speculative_config", method, "states in pages do not go back to an earlier token")
    if vllm_config.lora_config is not None:
        _refuse("enable_lora", True, "merge the adapter into the weights first (PEFT's merge_and_unload)")
    if model.quantization is not None:
        _refuse("quantization", model.quantization, "the layers are not vLLM's; use bfloat16 weights")
    if model.runner_type != "generate":
        _refuse("runner", model.runner_type, "only text is generated")
    if model.enable_prompt_embeds:
        _refuse("enable_prompt_embeds", True, "prompts are token ids")
    if vllm_config.cache_config.mamba_cache_mode == "all":
        _refuse("mamba_cache_mode", "all", "states are kept at the ends of pieces: use 'align'")
    if vllm_config.kv_transfer_config is not None:
        connector = vllm_config.kv_transfer_config.kv_connector
        _refuse("kv_transfer_config", connector, "pages are not sent to other engines")


def _refuse(name: str, value: Any, reason: str) -> None:
    raise ValueError(f"{name}={value!r} is not possible with the models of hf_hybrid_ssm in vLLM: {reason}.")


def check_model(config: Any) -> StateLayout:
    """What a model of this configuration keeps of a text.

    Raises:
        ValueError: such a model does not continue texts, or its full attention is not one that vLLM has.
    """
    with torch.device("meta"):
        model = model_class(config)._from_config(config)
    check_continues(model)
    layout = layout_without_running(model)
    check_pageable(model, layout, has_server=True)
    return layout


def model_class(config: Any) -> Any:
    """The language model of a configuration's family."""
    family = family_of(config.model_type)
    return family.load(family.heads["MODEL_FOR_CAUSAL_LM"])
