"""The teachers that students are tested with: tiny models of transformers' own, with random weights."""

from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import remap_legacy_layer_types

from hf_hybrid_ssm.students.initial import student_of
from hf_hybrid_ssm.students.teacher import attention_layers

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOW = 5
"""W, the tokens that a student's windows see before each."""
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
MIXED |= {"sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
# model type → what is special; windows of its own see 7 tokens before each
TEACHERS: dict[str, dict] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {**MIXED, "layer_norm_eps": 1e-5},  # no rotation in layers that see all tokens
    "ernie4_5": {},
    "exaone4": {**MIXED, "sliding_window_pattern": 2},
    "gemma": {},
    "gemma2": MIXED,  # scores are capped
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 8},
    "glm": {},
    "glm4": {},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": 4},
    "gpt_oss": {**MIXED, **EXPERTS, "num_local_experts": 4},
    "granite": {
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
    },
    "helium": {},
    "hunyuan_v1_dense": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "llama": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}},
    "mistral": {"sliding_window": None},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {"sliding_window": None},
}
if remap_legacy_layer_types(["conv"]) != [
    "conv"
]:  # transformers 5.16 renames these layers, and then does not find their masks
    del TEACHERS["lfm2"]
OF_EXPERTS = [name for name, fields in TEACHERS.items() if fields.items() >= EXPERTS.items()]
FLOAT32 = OF_EXPERTS
"""Experts that are multiplied in no other dtype here."""
REFUSED = {
    "bloom": "does not pass transformers' attention interface",
    "gemma3": "is of several parts",
    "gpt2": "not rotary",
    "nemotron": "hand no keyword arguments on",
    "opt": "not rotary",
    "stablelm": "hand no keyword arguments on",
}


@cache
def teacher(name: str, **sizes: int) -> torch.nn.Module:
    """In evaluation mode, float64 where it can be."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **TEACHERS[name], **sizes})
    options = {"dtype": torch.float32 if name in FLOAT32 else torch.float64}
    if name == "gemma2":
        options["attn_implementation"] = (
            "eager"  # torch's attention caps no scores: old versions leave it out silently
        )
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def full_layers(name: str) -> list[int]:
    """The layers whose attention sees all tokens."""
    config = teacher(name).config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [index for index, kind in enumerate(kinds) if kind == "full_attention"]


# kind → what is kept, of the layers that see all tokens, and the plan besides
KINDS = {
    "windows": (lambda layers: [], {"sink": None}),
    "kept": (lambda layers: layers, {}),
    "mixed": (lambda layers: [(layers[0], 1), layers[-1]], {"sink": None}),
    "constant": (lambda layers: [(layers[0], 1), layers[-1]], {"sink": "constant", "attn_scale": 0.3}),
    "first_token": (lambda layers: [(layers[0], 1), layers[-1]], {"sink": "first_token"}),
    "constant in all": (lambda layers: [], {"sink": "constant"}),
}


@cache
def student(name: str, kind: str) -> torch.nn.Module:
    """Of a teacher, in float64 where it can be."""
    kept, plan = KINDS[kind]
    return student_of(teacher(name), keep=kept(full_layers(name)), window=WINDOW, **plan)


def tolerance(name: str) -> dict[str, float]:
    if name in FLOAT32:
        return {"rtol": 0, "atol": 3e-5}
    # eager attention of transformers has its softmax in float32
    return {"rtol": 0, "atol": 1e-5 if teacher(name).config._attn_implementation == "eager" else 1e-12}


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def masked(name: str, ids: torch.Tensor, groups_that_see_all=(), layers=(), first: bool = False) -> torch.Tensor:
    """What the teacher computes when the layers that see all tokens get windows, but for some groups or layers.

    Args:
        first: all tokens see the first one too.
    """
    model, length, changed = teacher(name), ids.shape[1], set(full_layers(name)) - set(layers)
    config = model.config
    distance = torch.arange(length)[:, None] - torch.arange(length)
    causal = distance >= 0
    window = causal & ((distance <= WINDOW) | (first & (torch.arange(length) == 0)))
    per_group = config.num_attention_heads // getattr(config, "num_key_value_heads", config.num_attention_heads)

    def windowed(module, args, kwargs):
        if module.layer_idx not in changed:
            return None
        heads = [head // per_group for head in range(config.num_attention_heads)]
        seen = torch.stack([causal if (module.layer_idx, group) in groups_that_see_all else window for group in heads])
        own, lowest = kwargs["attention_mask"], torch.finfo(model.dtype).min
        if own is not None:
            seen = seen & (own if own.dtype == torch.bool else own == 0)
        mask = torch.zeros(1, len(heads), length, length, dtype=model.dtype).masked_fill(~seen, lowest)
        return args, kwargs | {"attention_mask": mask}

    attention = [model.base_model.get_submodule(layer.name) for layer in attention_layers(config).values()]
    hooks = [module.register_forward_pre_hook(windowed, with_kwargs=True) for module in attention]
    try:
        return model(ids).logits
    finally:
        for hook in hooks:
            hook.remove()


def exactly(model: torch.nn.Module) -> torch.nn.Module:
    """The model, whose norms and angles are computed in float64 from now on: transformers' are of float32."""

    def angles(module, args, kwargs, output):
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        turns = (positions[..., None].double() * module.inv_freq.double()).repeat(1, 1, 2)
        return turns.cos() * module.attention_scaling, turns.sin() * module.attention_scaling

    def norm(module, args, output):
        x, eps = args[0], getattr(module, "variance_epsilon", getattr(module, "eps", None))
        return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            module.register_forward_hook(angles, with_kwargs=True)
        elif "RMSNorm" in type(module).__name__:
            module.register_forward_hook(norm)
    return model
