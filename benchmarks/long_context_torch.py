"""The process of long_context.py that times one model in torch: `python -m benchmarks.long_context_torch REQUEST`.

REQUEST is JSON: `folder`, `form` (see FORMS), `kind` ("write" or "read"), `lengths`, `threads`, `steps`, `rounds`,
`seconds`. Each length gives one line of JSON.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

import hf_hybrid_ssm
from benchmarks.rounds import forget_peak, peak_bytes, reading, resident_bytes, timed, writing
from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.models.outputs import CACHE
from hf_hybrid_ssm.students.attention import OF_WINDOW

FORMS: dict[str, tuple[str, int | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "8 bits": ("bfloat16", 8),
    "4 bits": ("bfloat16", 4),
}
"""Name → dtype, and bits of the linear maps where these are fewer."""
WARM_UP = 16  # tokens, read before a prompt is timed


def load(folder: str, form: str) -> PreTrainedModel:
    dtype, bits = FORMS[form]
    quantization = {} if bits is None else {"quantization_config": hf_hybrid_ssm.LowBitConfig(bits=bits)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **quantization).eval()


def tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(model.config.vocab_size, (1, count), generator=generator)


def forward(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache) -> None:
    """Logits of the last token alone, as `generate` asks for them."""
    with torch.inference_mode():
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})


def filled_cache(model: PreTrainedModel, length: int) -> DynamicCache:
    """As if so many tokens had been read: as many of them as two windows hold are, random ones; what grows with the
    length then gets random keys and values, and what does not is told the length.

    A layer of context states costs more the later in its block a token is: these are told half a block more.
    """
    plan = getattr(model.config, "plan", None)
    layers = () if plan is None else plan.layers
    window = next((layer.window for layer in layers if layer.is_windowed), WARM_UP)
    cache = DynamicCache(config=model.config)
    forward(model, tokens(model, min(length, 2 * window)), cache)
    half = window // 2 if any(layer.memory == "context" for layer in layers) else 0
    for layer in cache.layers:
        _stand_at(layer, length, length + half)
    return cache


def _stand_at(layer: CacheLayerMixin, length: int, seen: int) -> None:
    if is_recurrent_state_layer(layer):
        layer.seen_tokens = seen
        for name in {"seen", f"{OF_WINDOW}seen"} & layer.states.keys():
            layer.states[name] = torch.full_like(layer.states[name], seen)
        if f"{OF_WINDOW}seen" in layer.states:  # the keys beside a window are those of all tokens
            for name in ("keys", "values"):
                layer.states[name] = _random_keys(layer.states[name], length)
    elif type(layer) is DynamicSlidingWindowLayer:
        layer.cumulative_length = length
    elif type(layer) is DynamicLayer:
        for name in ("keys", "values"):
            setattr(layer, name, _random_keys(getattr(layer, name), length))
    else:
        raise TypeError(f"{type(layer).__name__} is a layer of the cache that this benchmark cannot fill.")


def _random_keys(held: torch.Tensor, length: int) -> torch.Tensor:
    return torch.randn(*held.shape[:2], length, held.shape[3]).to(held.dtype)


def cache_bytes(cache: DynamicCache) -> int:
    """Of all tensors that its layers hold."""
    total = 0
    for layer in cache.layers:
        held = layer.states.values() if is_recurrent_state_layer(layer) else (layer.keys, layer.values)
        total += sum(part.numel() * part.element_size() for part in held)
    return total


def write(model: PreTrainedModel, length: int, request: dict[str, Any]) -> dict[str, Any]:
    """Tokens one by one, after so many; the first ones warm up."""
    cache, token = filled_cache(model, length), tokens(model, 1)
    size = cache_bytes(cache)

    def steps() -> None:
        for _ in range(request["steps"]):
            forward(model, token, cache)

    steps()
    found = writing(timed(steps, request), request["steps"])
    return found | {"resident_bytes": resident_bytes(), "cache_bytes": size}


def read(model: PreTrainedModel, length: int, request: dict[str, Any]) -> dict[str, Any]:
    """A prompt as a whole, from nothing."""
    forward(model, tokens(model, WARM_UP), DynamicCache(config=model.config))
    ids = tokens(model, length)
    caches: list[DynamicCache] = []

    def prompt() -> None:
        caches[:] = [DynamicCache(config=model.config)]
        forward(model, ids, caches[0])

    forget_peak()
    found = reading(timed(prompt, request), length)
    return found | {"peak_bytes": peak_bytes(), "cache_bytes": cache_bytes(caches[0])}


KINDS = {"write": write, "read": read}


def main(text: str) -> None:
    request = json.loads(text)
    torch.set_num_threads(request["threads"])
    model = load(request["folder"], request["form"])
    for length in request["lengths"]:
        print(json.dumps({"length": length} | KINDS[request["kind"]](model, length, request)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
