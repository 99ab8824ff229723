# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""LMU-ISA model configuration."""

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hf_hybrid_ssm.models.configuration import (
    DERIVED,
    GPT2_END_OF_TEXT,
    STATE_AND_KEYS_LAYER_TYPE,
    STATE_LAYER_TYPE,
    Derived,
    HybridConfigMixin,
    gpt2_end_of_text,
)

PRE_BLOCKS = ("ffn", "global_attention", "window_attention")
# float32 keeps the memory to 1e-5 over 16,384 steps up to these sizes; beyond, nothing was measured
LARGEST_ORDER, LARGEST_THETA = 1024, 4096.0

# name: layers, d, q, q', h1, h2, heads, h2 with global attention (table 3 of the paper; the last four are our own)
_SIZES = {
    "55k": (3, 48, 50, 5, 72, 105, 4, 80),
    "100k": (3, 65, 65, 7, 98, 142, 5, 109),
    "200k": (3, 91, 90, 9, 137, 210, 7, 164),
    "300k": (3, 112, 110, 13, 168, 253, 8, 196),
    "500k": (3, 144, 150, 15, 216, 333, 8, 260),
    "1m": (3, 204, 220, 22, 306, 469, 12, 366),
    "10m-rule": (3, 645, 250, 25, 968, 1595, 15, 1273),
    "10m-deep": (8, 384, 250, 25, 576, 1021, 6, 828),
    "100m-rule": (3, 2048, 250, 25, 3072, 5055, 16, 4031),
    "100m-deep": (12, 1024, 256, 24, 1536, 2518, 16, 2005),
}


def _presets() -> dict[str, dict[str, Any]]:
    presets = {}
    for name, (layers, width, order, reduced, pre, post, heads, post_global) in _SIZES.items():
        fields: dict[str, Any] = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "lmu_order": order,
            "lmu_reduced_order": reduced,
        }
        fields |= {"pre_intermediate_size": pre, "num_attention_heads": heads}
        if width >= 512:
            fields["attention_scale"] = width**-0.5  # unscaled logits saturate at such widths
        presets[name] = {**fields, "post_intermediate_size": post}
        presets[f"{name}-global"] = {
            **fields, "post_intermediate_size": post_global, "first_sublayer": "global_attention",
        }  # fmt: skip
    return presets


@strict
class LmuIsaConfig(HybridConfigMixin, PreTrainedConfig):
    r"""
    Configuration of an LMU-ISA model (arXiv 2110.02402). The defaults are the paper's model of a million parameters.

    Args:
        vocab_size (`int`, *optional*, defaults to 50257): Size of the vocabulary.
        hidden_size (`int`, *optional*, defaults to 204): Width d of the residual stream.
        num_hidden_layers (`int`, *optional*, defaults to 3): Number of blocks.
        lmu_order (`int`, *optional*, defaults to 220): q, polynomials that hold each channel's past.
        lmu_reduced_order (`int`, *optional*): q', rows of queries, keys and values; `lmu_order / 10` by default.
        lmu_theta (`float`, *optional*, defaults to 350.0): Window of the memory, in tokens.
        first_sublayer (`str`, *optional*, defaults to `"ffn"`): What comes before the memory: `"ffn"`,
            `"global_attention"`, or `"window_attention"`.
        pre_intermediate_size (`int`, *optional*): Width of the first feed-forward layer; `1.5 * hidden_size` by
            default.
        post_intermediate_size (`int`, *optional*, defaults to 469): Width of the one after the memory.
        num_attention_heads (`int`, *optional*, defaults to 12): Heads of the attention before the memory.
        sliding_window (`int`, *optional*, defaults to 256): Tokens that `"window_attention"` sees, including the
            current one.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of feed-forward layers and of queries, keys
            and values.
        use_bias (`bool`, *optional*, defaults to `True`): Biases everywhere.
        attention_scale (`float`, *optional*, defaults to 1.0): Scale of the logits of the implicit attention; the
            paper does not scale them, `hidden_size ** -0.5` suits wide models.
        layer_norm_epsilon (`float`, *optional*, defaults to 1e-5): Epsilon of the LayerNorms.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of initial weights, except for
            the reductions (`lmu_order ** -0.5`) and the collapse (`lmu_reduced_order ** -0.5`).
        hidden_dropout (`float`, *optional*, defaults to 0.0): Dropout of each branch.
        attention_dropout (`float`, *optional*, defaults to 0.0): Dropout of the attention weights before the memory.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`): Share embedding and language-model head.
        use_cache (`bool`, *optional*, defaults to `True`): Return the state for continuation.
        use_linear_cross_entropy (`bool`, *optional*, defaults to `False`): When training with labels, compute the loss
            in chunks that never hold all logits; `logits` is then `None`.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Special tokens; the last two GPT-2's end of text
            by default, if the vocabulary has it.

    ```python
    >>> from hf_hybrid_ssm import LmuIsaConfig, LmuIsaForCausalLM

    >>> config = LmuIsaConfig.preset("55k", vocab_size=100)
    >>> model = LmuIsaForCausalLM(config)
    ```
    """

    model_type = "lmu_isa"
    # the memory and its implicit attention are replicated on every device
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.attention.q_proj": "colwise_gather_output",
        "layers.*.attention.k_proj": "colwise_gather_output",
        "layers.*.attention.v_proj": "colwise_gather_output",
        "layers.*.attention.o_proj": "rowwise_split_input",
        "layers.*.pre_feed_forward.fc1": "colwise",
        "layers.*.pre_feed_forward.fc2": "rowwise",
        "layers.*.post_feed_forward.fc1": "colwise",
        "layers.*.post_feed_forward.fc2": "rowwise",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = _presets()

    derived: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "lmu_reduced_order": lambda config: max(1, round(config.lmu_order / 10)),
        "pre_intermediate_size": lambda config: math.floor(1.5 * config.hidden_size + 0.5),
        "bos_token_id": gpt2_end_of_text,
        "eos_token_id": gpt2_end_of_text,
    }

    vocab_size: int = 50257
    hidden_size: int = 204
    num_hidden_layers: int = 3
    lmu_order: int = 220
    lmu_reduced_order: Derived[int] = DERIVED
    lmu_theta: float | int = 350.0
    first_sublayer: str = "ffn"
    pre_intermediate_size: Derived[int] = DERIVED
    post_intermediate_size: int = 469
    num_attention_heads: int = 12
    sliding_window: int | None = 256
    hidden_act: str = "gelu"
    use_bias: bool = True
    attention_scale: float | int = 1.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    use_linear_cross_entropy: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = GPT2_END_OF_TEXT
    eos_token_id: int | list[int] | None = GPT2_END_OF_TEXT

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache layer each block needs."""
        keeps_all = self.first_sublayer == "global_attention"
        return [STATE_AND_KEYS_LAYER_TYPE if keeps_all else STATE_LAYER_TYPE] * self.num_hidden_layers

    def validate_architecture(self):
        """Sizes that fit together; a warning where the precision of the memory was not measured."""
        self.check_positive(
            "vocab_size", "hidden_size", "num_hidden_layers", "lmu_order", "lmu_reduced_order", "lmu_theta",
            "pre_intermediate_size", "post_intermediate_size", "layer_norm_epsilon", "attention_scale",
        )  # fmt: skip
        self.check_not_negative("initializer_range")
        self.check_dropout("hidden_dropout", "attention_dropout")
        self.check_activation("hidden_act")
        self.check_choice("first_sublayer", PRE_BLOCKS)
        if self.lmu_reduced_order > self.lmu_order:
            raise ValueError(
                f"lmu_reduced_order={self.lmu_reduced_order} must be at most lmu_order={self.lmu_order}: it reduces."
            )
        if self.first_sublayer != "ffn":
            self.check_positive("num_attention_heads", "sliding_window")
            self.check_multiple("hidden_size", "num_attention_heads")
        if self.first_sublayer == "window_attention" and self.sliding_window is None:
            raise ValueError('sliding_window=None, but first_sublayer is "window_attention": give its window.')
        if self.lmu_order > LARGEST_ORDER or self.lmu_theta > LARGEST_THETA:
            warnings.warn(
                f"lmu_order={self.lmu_order}, lmu_theta={self.lmu_theta}: float32 memories were measured up to "
                f"order {LARGEST_ORDER} and theta {LARGEST_THETA:.0f} (relative error 8e-6 after 16,384 tokens).",
                stacklevel=2,
            )
        if self.lmu_order > self.lmu_theta:
            warnings.warn(
                f"lmu_order={self.lmu_order} exceeds lmu_theta={self.lmu_theta}: the memory has more coefficients "
                "than tokens in its window, and the last ones hold nothing.",
                stacklevel=2,
            )


__all__ = ["LmuIsaConfig"]
