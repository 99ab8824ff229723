"""How do these families and transformers' own hybrids answer the same checks of batching, caches and generation?

Tiny models with random weights, float32, on the torch path of each. A check compares two ways to the same answer; the
tensors that a check passes are those of transformers' own conventions (`position_ids` everywhere, `seq_idx` and
`cu_seq_lens_*` of `DataCollatorWithFlattening` for packed rows). Its outcome is "same" (within `TOLERANCE` of the
spread of the logits; generated tokens equal), "refused" (an error, whose first line is kept) or "differs". What
`state_dropped` finds says that a wrong state would be seen.
"""

import argparse
import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    PreTrainedModel,
)

sys.path.insert(0, str(Path(__file__).parent))

from timing import machine_arguments, write_results

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.models.outputs import CACHE

TOLERANCE = 1e-4  # of the standard deviation of the logits; roundings of float32 reach 3e-5 of it
SPREAD = 0.7  # of the matrices: wide, so that every layer and every state tells in the logits
SPREADS = {"Kimi Linear": 0.3}  # whose roundings of float32 reach 1.5e-4 with wider ones, and 1e-13 in float64
DRAWS = 3  # of inputs, for each check
WORDS, PADDING = 61, 0

_SIZES = {"vocab_size": WORDS, "pad_token_id": PADDING, "bos_token_id": None, "eos_token_id": None}
_NARROW = {"hidden_size": 32, "num_hidden_layers": 2}
_HEADS = _NARROW | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48}
_EXPERTS |= {"shared_expert_intermediate_size": 48}
_BOTH = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
_DELTA |= {"linear_value_head_dim": 8}
_LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
_LATENT |= {"mlp_layer_types": ["dense", "dense"]}
_WINDOWS = _NARROW | {"num_attention_heads": 4, "intermediate_size": 48, "sliding_window": 6}
_KINDS = {"layer_types": ["longhorn", "window_attention", "full_attention"], "num_hidden_layers": 3}
_LMU = {"lmu_order": 20, "lmu_theta": 24.0, "num_attention_heads": 4, "post_intermediate_size": 48}
_NEMOTRON = {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8}
_NEMOTRON |= {"ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "head_dim": 8}
_NEMOTRON |= {name: value for name, value in _HEADS.items() if name != "num_hidden_layers"}
_TWO = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8}
Model = tuple[str, dict[str, Any]]
"""The model type and the fields of its configuration."""
OURS: dict[str, Model] = {
    "Longhorn": ("longhorn", _NARROW),
    "Longhorn, with attention": ("longhorn", {**_NARROW, **_KINDS, "num_attention_heads": 4, "sliding_window": 6}),
    "SPADE": ("spade", _WINDOWS),
    "BST": ("bst", {**_WINDOWS, "ssm_layers": [0]}),
    "LMU-ISA": ("lmu_isa", _NARROW | _LMU),
}
PEERS: dict[str, Model] = {
    "Llama": ("llama", _HEADS),
    "Mamba": ("mamba", {**_NARROW, "state_size": 8}),
    "Mamba-2": ("mamba2", _NARROW | _TWO),
    "Jamba": ("jamba", _HEADS | _JAMBA),
    "Bamba": ("bamba", {**_HEADS, **_MAMBA2, "attn_layer_indices": [1]}),
    "Falcon-H1": ("falcon_h1", {**_HEADS, **_MAMBA2, "mamba_d_ssm": 64}),
    "Qwen3-Next": ("qwen3_next", {**_HEADS, **_BOTH, **_DELTA, **_EXPERTS, "head_dim": 8}),
    "Qwen3.5": ("qwen3_5_text", {**_HEADS, **_BOTH, **_DELTA, "head_dim": 8}),
    "OLMo Hybrid": ("olmo_hybrid", _HEADS | _BOTH | _DELTA),
    "Kimi Linear": ("kimi_linear", {**_HEADS, **_BOTH, **_LATENT, "linear_num_heads": 4, "linear_head_dim": 8}),
    "Ling 3": ("bailing_hybrid", {**_HEADS, **_BOTH, **_LATENT, "head_dim": 8}),
    "Nemotron-H": ("nemotron_h", _NEMOTRON),
    "Granite 4.0 H": (
        "granitemoehybrid",
        _HEADS
        | _MAMBA2
        | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48},
    ),
}
MODELS = PEERS | OURS


def build(name: str) -> PreTrainedModel:
    """The tiny model, without dropout; every draw of weights is the same."""
    torch.manual_seed(0)
    model_type, fields = MODELS[name]
    config = AutoConfig.for_model(model_type, **_SIZES | fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.pad_token_id = PADDING
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.normal_(std=1.0 if isinstance(module, torch.nn.Embedding) else SPREADS.get(name, SPREAD))
    return model


class Answer(NamedTuple):
    """What a check compares: the found logits or tokens, and the expected ones."""

    found: Tensor
    expected: Tensor


# -- the ways to call a model ----------------------------------------------------------------------------------------


def draw(generator: torch.Generator, low: int, high: int) -> Tensor:
    """A text of `low` to `high` tokens, (1, L), without padding."""
    length = int(torch.randint(low, high + 1, (), generator=generator))
    return torch.randint(1, WORDS, (1, length), generator=generator)


def positions(count: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + count)[None]


def forward(model: PreTrainedModel, ids: Tensor, **given: Any) -> Any:
    """Models without positions (Mamba) take none; the others are told them, as `generate` does."""
    if "position_ids" not in given:
        given["position_ids"] = positions(ids.shape[1])
    return model(ids, **given)


def cache_of(output: Any) -> Any:
    return output[next(name for name in ("cache", "past_key_values", "cache_params") if name in output)]


def named(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """Mamba and Mamba-2 called the argument `cache_params` before transformers 5.24."""
    is_mamba = model.config.model_type in ("mamba", "mamba2")
    return {"cache_params" if CACHE == "past_key_values" and is_mamba else CACHE: cache}


def in_chunks(model: PreTrainedModel, ids: Tensor, ends: list[int], cache: Any = None, start: int = 0) -> Tensor:
    """Logits of ids[:, start:], read in chunks that end at `ends`."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits = []
    for end in ends:
        given = {"position_ids": positions(end - start, start), "use_cache": True, **named(model, cache)}
        output = forward(model, ids[:, start:end], **given)
        cache, start = cache_of(output), end
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def greedy(model: PreTrainedModel, ids: Tensor, **given: Any) -> Tensor:
    return model.generate(ids, max_new_tokens=10, do_sample=False, **given)


# -- the checks ------------------------------------------------------------------------------------------------------


def padding(model: PreTrainedModel, generator: torch.Generator, on_the_left: bool) -> Answer:
    short, long = draw(generator, 5, 9), draw(generator, 12, 15)
    missing = long.shape[1] - short.shape[1]
    filler, hidden = torch.full((1, missing), PADDING), torch.zeros(1, missing, dtype=torch.long)
    rows, masks = ([filler, short], [hidden, torch.ones_like(short)]) if on_the_left else ([], [])
    if not on_the_left:
        rows, masks = [short, filler], [torch.ones_like(short), hidden]
    ids, mask = torch.cat([long, torch.cat(rows, 1)]), torch.cat([torch.ones_like(long), torch.cat(masks, 1)])
    place = (mask.cumsum(1) - 1).clamp(min=0)
    logits = forward(model, ids, attention_mask=mask, position_ids=place).logits
    own = logits[1:, missing:] if on_the_left else logits[1:, : short.shape[1]]
    return Answer(own, forward(model, short).logits)


def packing(model: PreTrainedModel, generator: torch.Generator, positions_alone: bool) -> Answer:
    documents = [draw(generator, 4, 9) for _ in range(3)]
    everything = {} if positions_alone else {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    batch = DataCollatorWithFlattening(return_tensors="pt", **everything)([{"input_ids": d[0]} for d in documents])
    batch.pop("labels")
    found = forward(model, batch.pop("input_ids"), use_cache=False, **batch).logits
    return Answer(found, torch.cat([forward(model, document).logits for document in documents], dim=1))


def chunked_prefill(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    ids = draw(generator, 16, 20)
    return Answer(in_chunks(model, ids, [5, 9, ids.shape[1]]), forward(model, ids).logits)


def token_by_token(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    ids = draw(generator, 16, 20)
    return Answer(in_chunks(model, ids, [6, *range(7, ids.shape[1] + 1)]), forward(model, ids).logits)


def rollback(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    """Read, take the last three tokens back by `crop`, and go on."""
    ids = draw(generator, 16, 20)
    cache, length = DynamicCache(config=model.config), ids.shape[1]
    cache.activate_past_recording()
    in_chunks(model, ids, [7, length - 2], cache)
    cache.crop(-3)
    found = in_chunks(model, ids, [length], cache, start=length - 5)
    return Answer(found, forward(model, ids).logits[:, length - 5 :])


def copied_cache(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    """A prompt is read once; two texts go on from copies of its cache."""
    ids = draw(generator, 10, 12)
    cache = DynamicCache(config=model.config)
    in_chunks(model, ids, [ids.shape[1]], cache)
    found, expected = [], []
    for _ in range(2):
        text = torch.cat([ids, draw(generator, 1, 1)], dim=1)
        found.append(in_chunks(model, text, [text.shape[1]], copy.deepcopy(cache), start=ids.shape[1]))
        expected.append(forward(model, text).logits[:, -1:])
    return Answer(torch.cat(found), torch.cat(expected))


def cached_text(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    ids = draw(generator, 8, 12)
    return Answer(greedy(model, ids), greedy(model, ids, use_cache=False))


def text_of_a_padded_batch(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    short, long = draw(generator, 5, 8), draw(generator, 11, 14)
    filler = torch.full((1, long.shape[1] - short.shape[1]), PADDING)
    ids = torch.cat([long, torch.cat([filler, short], dim=1)])
    together = greedy(model, ids, attention_mask=(ids != PADDING).long())
    return Answer(together[1:, long.shape[1] :], greedy(model, short)[:, short.shape[1] :])


def text_with_chunked_prefill(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    ids = draw(generator, 12, 16)
    return Answer(greedy(model, ids, prefill_chunk_size=5), greedy(model, ids))


def beam_search(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    ids = draw(generator, 8, 12)
    return Answer(greedy(model, ids, num_beams=3), greedy(model, ids, num_beams=3, use_cache=False))


def prompt_lookup(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    ids = draw(generator, 5, 6).repeat(1, 3)  # a text that repeats itself, so that drafts are found
    return Answer(greedy(model, ids, prompt_lookup_num_tokens=3), greedy(model, ids))


def assisted(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    ids = draw(generator, 8, 12)
    return Answer(greedy(model, ids, assistant_model=copy.deepcopy(model)), greedy(model, ids))


def static_cache(model: PreTrainedModel, generator: torch.Generator) -> Answer:
    ids = draw(generator, 8, 12)
    model.generation_config.disable_compile = True  # compiling is another question
    return Answer(greedy(model, ids, cache_implementation="static"), greedy(model, ids))


CHECKS: dict[str, Callable[[PreTrainedModel, torch.Generator], Answer]] = {
    "padding on the left": lambda model, generator: padding(model, generator, on_the_left=True),
    "padding on the right": lambda model, generator: padding(model, generator, on_the_left=False),
    "packing, by `position_ids`": lambda model, generator: packing(model, generator, positions_alone=True),
    "packing, by all that the collator gives": lambda model, generator: packing(model, generator, False),
    "token by token": token_by_token,
    "prefill in chunks": chunked_prefill,
    "a copied cache": copied_cache,
    "rollback by `crop`": rollback,
    "greedy text, with a cache": cached_text,
    "greedy text of a padded batch": text_of_a_padded_batch,
    "greedy text, `prefill_chunk_size`": text_with_chunked_prefill,
    "beam search, with a cache": beam_search,
    "prompt lookup": prompt_lookup,
    "assisted generation": assisted,
    "static cache": static_cache,
}


def state_dropped(model: PreTrainedModel) -> float:
    """The deviation where the recurrent states are zeroed in the middle of a text: what the checks could see."""
    ids = draw(torch.Generator().manual_seed(0), 18, 18)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        in_chunks(model, ids, [9], cache)
        for layer in cache.layers:
            for held in (getattr(layer, "recurrent_states", None), getattr(layer, "states", None)):
                for state in (held or {}).values():
                    state.zero_()
        return deviation(Answer(in_chunks(model, ids, [18], cache, start=9), forward(model, ids).logits[:, 9:]))


def deviation(answer: Answer) -> float:
    """Of logits, the largest difference over their spread; of tokens, the share that differs."""
    found, expected = answer
    if found.dtype == torch.long:  # of one length: no text ends before its time
        return (found != expected).float().mean().item()
    return ((found - expected).abs().max() / expected.std()).item()


def outcome(model: PreTrainedModel, check: str) -> dict[str, Any]:
    """Of `DRAWS` draws: the first error, or the largest deviation."""
    worst = 0.0
    for seed in range(DRAWS):
        try:
            with torch.inference_mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                worst = max(worst, deviation(CHECKS[check](model, torch.Generator().manual_seed(seed))))
        except Exception as error:
            told = (str(error).strip().splitlines() or [""])[0]
            return {"outcome": "refused", "error": f"{type(error).__name__}: {told[:200]}"}
    return {"outcome": "same" if worst <= TOLERANCE else "differs", "deviation": float(f"{worst:.2g}")}


def compared(names: list[str], checks: list[str]) -> dict[str, dict[str, Any]]:
    """Model → its outcomes by check, and `state_dropped`."""
    found = {}
    for name in names:
        model = build(name)
        dropped = float(f"{state_dropped(model):.2g}")
        found[name] = {"state_dropped": dropped, "checks": {check: outcome(model, check) for check in checks}}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Mamba and Longhorn alone; nothing is written")
    arguments = machine_arguments(parser, threads=1)
    if arguments.device != "cpu":
        parser.error("the checks are about results, not speed: they run on a CPU")
    transformers.logging.set_verbosity_error()  # of peers that run without their kernels
    models = compared(["Mamba", "Longhorn"] if arguments.quick else list(MODELS), list(CHECKS))
    figures = {"tolerance": TOLERANCE, "draws": DRAWS, "ours": list(OURS), "models": models}
    write_results("comparison", figures)


if __name__ == "__main__":
    main()
