"""Models of one size: every family and its peers, a training step, and a decoded token.

`width` and `depth` are those of a transformer with 12 width² weights a layer. A layer of Longhorn or Mamba has half as
many, so these have twice the layers. Stacks are uniform: "BST SH" has context states in every layer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.models.outputs import CACHE

FAMILIES = ("Longhorn", "SPADE", "BST sliding", "BST SH", "BST MF", "Block-Recurrent", "LMU-ISA")
PEERS = ("Llama", "Mamba")
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
BST_LAYERS: dict[str, dict[str, Any]] = {
    "BST sliding": {"layer_types": "window_attention"},
    "BST SH": {"layer_types": "bst"},
    "BST MF": {"layer_types": "bst", "context_variant": "mf"},
    "Block-Recurrent": {"layer_types": "block_recurrent"},
}


def config_fields(name: str, width: int, depth: int, window: int = 512) -> tuple[str, dict[str, Any]]:
    """The model type and the fields of its configuration."""
    head = min(64, width // 2)
    common = {"hidden_size": width, "num_hidden_layers": depth}
    heads = {"num_attention_heads": width // head}
    if name == "Longhorn":
        return "longhorn", {**common, "num_hidden_layers": 2 * depth}
    if name == "Mamba":
        return "mamba", {**common, "num_hidden_layers": 2 * depth, "state_size": 16, "use_mambapy": False}
    if name == "Llama":
        return "llama", {**common, **heads, "intermediate_size": 16 * round(width / 6), "tie_word_embeddings": True}
    if name == "LMU-ISA":
        sizes = {"lmu_order": width // 4, "post_intermediate_size": 9 * width // 2, "attention_scale": width**-0.5}
        return "lmu_isa", {**common, **heads, **sizes}
    wide = {**common, **heads, **NO_DROPOUT, "intermediate_size": 4 * width, "sliding_window": window}
    if name == "SPADE":
        return "spade", {**wide, "embedding_dropout": 0.0}
    layers = {**BST_LAYERS[name], "layer_types": [BST_LAYERS[name]["layer_types"]] * depth}
    own = {"head_dim": head, "final_dropout": 0.0, "recurrent_num_states": window}
    return "bst", {**wide, **own, **layers}


def build(
    name: str,
    width: int,
    depth: int,
    *,
    vocabulary: int = 32000,
    window: int = 512,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A model with random weights, in evaluation mode."""
    torch.manual_seed(0)
    model_type, fields = config_fields(name, width, depth, window)
    config = AutoConfig.for_model(model_type, **fields, **TOKENS, vocab_size=vocabulary)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    return model.to(device=device, dtype=dtype).eval()


def cache_argument(model: PreTrainedModel) -> str:
    """Mamba had a name of its own before transformers 5.24."""
    return "cache_params" if CACHE == "past_key_values" and model.config.model_type == "mamba" else CACHE


def read_prompt(model: PreTrainedModel, cache: Any, length: int = 16) -> None:
    """The first tokens, so that what follows is decoding."""
    prompt = torch.zeros(1, length, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(prompt, use_cache=True, **{cache_argument(model): cache})


def decoder(model: PreTrainedModel, steps: int, *, record_past: bool = False) -> Callable[[], None]:
    """`steps` tokens of one row, one at a time, after a prompt of 16; `record_past`: undone at the end."""
    name = cache_argument(model)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    cache = DynamicCache(config=model.config)
    if record_past:
        for layer in cache.layers:
            layer.activate_past_recording()
    read_prompt(model, cache)

    def run() -> None:
        with torch.inference_mode():
            for _ in range(steps):
                model(token, use_cache=True, **{name: cache})
        if record_past:
            cache.crop(-steps)

    return run


def bare_products(model: PreTrainedModel, steps: int = 1) -> Callable[[], None]:
    """One product with every matrix of the model, what any implementation must do."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    sizes = {weight.shape[1] for weight in weights}
    rows = {size: torch.ones(1, size, device=model.device, dtype=model.dtype) for size in sizes}

    def run() -> None:
        with torch.inference_mode():
            for _ in range(steps):
                for weight in weights:
                    F.linear(rows[weight.shape[1]], weight)

    return run


def random_rows(batch: int, length: int, vocabulary: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (batch, length), generator=generator).to(device)


def batch_of(kind: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of a model: rows that are "plain", "padded" (on the left, up to half) or four documents "packed"."""
    batch, length = rows.shape
    if kind == "padded":
        real = torch.linspace(length // 2, length, batch).long()
        mask = (torch.arange(length) >= (length - real).unsqueeze(1)).to(rows.device)
        labels = rows.masked_fill(~mask, -100)
        return {"input_ids": rows, "attention_mask": mask.long(), "labels": labels}
    if kind == "packed":
        documents = torch.arange(length) // max(1, -(-length // 4))
        return {"input_ids": rows, "labels": rows, "seq_idx": documents.expand(batch, -1).to(rows.device)}
    return {"input_ids": rows, "labels": rows}


def training_step(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], *, autocast: torch.dtype | None = None
) -> Callable[[], None]:
    """Forward, loss, backward and AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model.train()

    def step() -> None:
        with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
