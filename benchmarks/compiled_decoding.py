"""What does a token cost in weights of 4 bits, eager and compiled (`compiled_decoding`), and what the attention of one
token beside reading its keys and values?

    python benchmarks/compiled_decoding.py FOLDER                     # twice: the second one finds what is compiled
    python benchmarks/compiled_decoding.py FOLDER --llama-cpp GGUF    # after llama.cpp
    python benchmarks/compiled_decoding.py FOLDER --form "4 bits, head too"
    python benchmarks/compiled_decoding.py FOLDER --text TEXT.jsonl   # the loss alone, in every form
    python benchmarks/compiled_decoding.py --attention                # the op alone

FOLDER is a student (`hf-hybrid-ssm upcycle`); 4 bits are over bfloat16. $HF_HYBRID_SSM_LLAMA_PYTHON is a Python with
llama-cpp-python. Each call adds to the results.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from timing import COMMIT, RESULTS, machine_arguments, paired_seconds, write_results
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache
from weight_only import losses

from benchmarks.long_context import LLAMA_PYTHON, ROOT, environment_of_llama_cpp
from hf_hybrid_ssm import LowBitConfig, compiled_decoding
from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.ops.local_attention import slot_attention

FORMS: dict[str, tuple[torch.dtype, dict[str, int]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "4 bits": (torch.bfloat16, {"bits": 4}),
    "4 bits, head too": (torch.bfloat16, {"bits": 4, "head_bits": 4}),
}
LENGTHS, STEPS, ROUNDS = (512, 2048, 4096, 8192, 32768), 6, 9
ROOM = LENGTHS[-1] + 256  # of a static cache
READ = 512  # tokens, of which windows are full
SLOTS = (256, 2048, 65536)
HEADS, GROUPS, WIDTH = 9, 3, 64  # SmolLM2-135M's
LAYERS_BYTES = 400e6  # of keys and values that take turns, as those of many layers do


def load(folder: str, form: str) -> PreTrainedModel:
    dtype, bits = FORMS[form]
    low_bits = {"quantization_config": LowBitConfig(**bits)} if bits else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **low_bits).eval()


@torch.no_grad()
def token(folder: str, form: str) -> dict[str, Any]:
    """Milliseconds after so many tokens, eager and compiled in turns, and the seconds that compiling takes here."""
    model = load(folder, form)

    def steps(call: Callable, cache: StaticCache) -> None:
        ids = torch.ones(1, 1, dtype=torch.long)
        for _ in range(STEPS):
            ids = call(input_ids=ids, use_cache=True, logits_to_keep=1, cache=cache).logits.argmax(-1)

    candidates, first = {}, 0.0
    for length in LENGTHS:
        cache = filled_cache(model, length)
        compiled = model.get_compiled_call(compiled_decoding())
        begin = time.perf_counter()
        steps(compiled, cache)
        first = first or time.perf_counter() - begin
        candidates |= {(length, name): lambda c=call, h=cache: steps(c, h) for name, call in
                       (("eager", model), ("compiled", compiled))}  # fmt: skip
    seconds = paired_seconds(candidates, rounds=ROUNDS, warm_up=1)
    found = {str(length): {} for length in LENGTHS}
    for (length, name), value in seconds.items():
        found[str(length)][name] = round(1000 * value / STEPS, 2)
    return {"seconds_of_first_tokens": round(first, 1), "milliseconds_per_token": found}


def filled_cache(model: PreTrainedModel, length: int) -> StaticCache:
    """As if so many tokens had been read: random keys and values, of which layers are told the number."""
    generator = torch.Generator().manual_seed(0)
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    model(torch.randint(model.config.vocab_size, (1, READ), generator=generator), logits_to_keep=1, cache=cache)
    for layer in cache.layers:
        is_state = is_recurrent_state_layer(layer)
        held = layer.states if is_state else {"keys": layer.keys, "values": layer.values}
        for name, tensor in held.items():
            if tensor.is_floating_point():
                tensor.normal_(generator=generator)
            elif name.endswith("seen"):
                tensor.fill_(length)
        (layer.seen_tokens if is_state else layer.cumulative_length).fill_(length)
    return cache


def llama_cpp(file: str) -> dict[str, float]:
    """Milliseconds a token after so many, of a process of its own."""
    asked = {"steps": 16, "rounds": 5, "seconds": 20, "threads": torch.get_num_threads(), "lengths": LENGTHS}
    request = json.dumps(asked | {"kind": "write", "file": os.path.abspath(file)})
    command = [os.environ[LLAMA_PYTHON], "-m", "benchmarks.long_context_llama_cpp", request]
    env = environment_of_llama_cpp()
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in said.splitlines()]
    return {str(line["length"]): line["milliseconds_per_token"] for line in lines}


def beside_llama_cpp(file: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    before = llama_cpp(file)  # for afterwards threads of this process may wait in a loop
    found = run()
    for length, by_name in found["milliseconds_per_token"].items():
        by_name["llama.cpp"] = round(before[length], 2)
    return found


@torch.inference_mode()
def attention(slots: int, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of the op and of one sum of the same keys and values, each of layers in turns."""
    size = 2 * GROUPS * slots * WIDTH * dtype.itemsize
    layers = max(2, min(30, int(LAYERS_BYTES / size)))
    shapes = ((1, HEADS, 1, WIDTH), (1, GROUPS, 1, WIDTH), (1, GROUPS, 1, WIDTH))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    held = [[torch.randn(1, GROUPS, slots, WIDTH).to(dtype) for _ in "kv"] for _ in range(layers)]
    sink = {"sink_logits": torch.randn(1, HEADS, 1), "sink_values": torch.randn(GROUPS, WIDTH)}
    window, layout = ((slots, 0), "full") if slots <= 4096 else ((None, 0), "by_rank")
    seen = torch.tensor([slots - 1])

    def run() -> None:
        for keys, values in held:
            slot_attention(q, k, v, keys, values, seen, window=window, layout=layout, **sink)

    def read() -> None:
        for pair in held:
            for part in pair:
                part.view(torch.float32).sum()

    found = paired_seconds({"attention": run, "reading": read}, rounds=31)
    return {"bytes": size} | {name: round(1e6 * value / layers, 1) for name, value in found.items()}


def add(part: str, name: str, found: Any) -> None:
    file = RESULTS / "compiled_decoding.json"
    figures = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    parts = {key: figures.get(key, {}) for key in ("tokens", "attention", "loss")}
    earlier = parts[part].get(name, {}).get("seconds_of_first_tokens") if part == "tokens" else None
    if earlier is not None:  # of the process that compiled, and of the last one
        before = earlier if isinstance(earlier, list) else [earlier]
        found |= {"seconds_of_first_tokens": [before[0], found["seconds_of_first_tokens"]]}
    parts[part][name] = {"commit": COMMIT} | found
    write_results("compiled_decoding", parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a student")
    parser.add_argument("--form", choices=FORMS, default="4 bits")
    parser.add_argument("--llama-cpp", metavar="GGUF", help="the same weights, for llama.cpp")
    parser.add_argument("--text", type=Path, help="JSON lines with a field `text`: take the loss")
    parser.add_argument("--attention", action="store_true")
    given = machine_arguments(parser)
    if (given.folder is None) != given.attention:
        parser.error("give FOLDER, or --attention.")
    if given.attention:
        for dtype in (torch.bfloat16, torch.float32):
            for slots in SLOTS:
                add("attention", f"{slots}, {str(dtype).partition('.')[2]}", attention(slots, dtype))
    elif given.text is not None:
        found = losses(given.folder, given.text, FORMS, load)
        add("loss", Path(given.folder).name, found)
    else:
        run = partial(token, given.folder, given.form)
        name = f"{Path(given.folder).name}, {given.form}"
        add("tokens", name, beside_llama_cpp(given.llama_cpp, run) if given.llama_cpp else run())


if __name__ == "__main__":
    main()
