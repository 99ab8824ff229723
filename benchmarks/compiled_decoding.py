"""What does a token cost in weights of 4 bits, eager and compiled (`compiled_decoding`), and what the attention of one
token beside reading its keys and values?

    python benchmarks/compiled_decoding.py FOLDER                     # twice: the second one finds what is compiled
    python benchmarks/compiled_decoding.py FOLDER --llama-cpp GGUF    # after llama.cpp
    python benchmarks/compiled_decoding.py FOLDER --form "4 bits, head too"
    python benchmarks/compiled_decoding.py FOLDER --text TEXT.jsonl   # the loss alone, in every form
    python benchmarks/compiled_decoding.py FOLDER --facts FILE...     # what it recalls in every form
    python benchmarks/compiled_decoding.py --attention                # the op alone
    python benchmarks/compiled_decoding.py --head                     # and the product with the head's 8 bits
    python benchmarks/compiled_decoding.py --families "BST SH"        # by name, of 24 layers of width 1,024

FOLDER is a student (`hf-hybrid-ssm upcycle`); 4 bits are over bfloat16. $HF_HYBRID_SSM_LLAMA_PYTHON is a Python with
llama-cpp-python. Each call adds to the results.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from timing import COMMIT, RESULTS, machine_arguments, paired_seconds, write_results
from timing.models import build
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache
from weight_only import losses

from benchmarks.long_context import LLAMA_PYTHON, ROOT, environment_of_llama_cpp
from hf_hybrid_ssm import LowBitConfig, compiled_decoding
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import answers_of
from hf_hybrid_ssm.evaluation.recall_tasks.real_texts import real_texts
from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear
from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.ops.int8_product import int8_product
from hf_hybrid_ssm.ops.local_attention import slot_attention

FORMS: dict[str, tuple[torch.dtype, dict[str, int]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "8 bits": (torch.bfloat16, {"bits": 8}),
    "4 bits": (torch.bfloat16, {"bits": 4}),
    "4 bits, head too": (torch.bfloat16, {"bits": 4, "head_bits": 4}),
}
LENGTHS, STEPS, ROUNDS = (512, 2048, 4096, 8192, 32768), 6, 9
ROOM = LENGTHS[-1] + 256  # of a static cache
READ = 512  # tokens, of which windows are full
SLOTS = (256, 2048, 65536)
HEADS, GROUPS, WIDTH = 9, 3, 64  # SmolLM2-135M's
HEAD = (49152, 576)  # SmolLM2-135M's too
FACT_TOKENS, FACT_TEXTS = 1024, 20
FAMILIES = ("Longhorn", "SPADE", "BST SH", "LMU-ISA")
FAMILY_WIDTH, FAMILY_DEPTH, FAMILY_ROUNDS = 1024, 24, 7  # Longhorn has twice the layers, of half as many weights
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


@torch.no_grad()
def family(name: str, form: str) -> dict[str, Any]:
    """Milliseconds of a token of random weights, eager and compiled, and of the matrix products alone, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        build(name, FAMILY_WIDTH, FAMILY_DEPTH).save_pretrained(folder)
        model = load(folder, form)
    cache = StaticCache(config=model.config, max_cache_len=READ)
    model(torch.ones(1, 16, dtype=torch.long), logits_to_keep=1, cache=cache)
    ids, compiled = torch.ones(1, 1, dtype=torch.long), model.get_compiled_call(compiled_decoding())

    def step(call: Callable) -> None:
        call(input_ids=ids, use_cache=True, logits_to_keep=1, cache=cache)

    candidates = {"eager": partial(step, model), "compiled": partial(step, compiled), "products": products_of(model)}
    seconds = paired_seconds(candidates, rounds=FAMILY_ROUNDS * STEPS, warm_up=2)
    return {way: round(1000 * value, 2) for way, value in seconds.items()}


def products_of(model: PreTrainedModel) -> Callable[[], None]:
    """One product of every linear map of the model, by its own weights of any form; of LMU-ISA's memories (q, D) also
    their reductions to queries, keys and values (3 q', q), whose weights are small and whose memories are not."""
    maps = [module for module in model.modules() if isinstance(module, nn.Linear | LowBitLinear)]
    rows = {module.in_features: torch.ones(1, 1, module.in_features, dtype=model.dtype) for module in maps}

    reductions = [
        part.reduce_weight.float().flatten(0, 1) for part in model.modules() if hasattr(part, "reduce_weight")
    ]
    memories = [torch.ones(weight.shape[1], model.config.hidden_size) for weight in reductions]

    def run() -> None:
        for module in maps:
            module(rows[module.in_features])
        for weight, memory in zip(reductions, memories):
            weight @ memory

    return run


@torch.inference_mode()
def attention(slots: int, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of the op and of one sum of the same keys and values, each of layers in turns."""
    size = 2 * GROUPS * slots * WIDTH * dtype.itemsize
    layers = max(2, min(30, int(LAYERS_BYTES / size)))
    shapes = ((1, HEADS, 1, WIDTH), (1, GROUPS, 1, WIDTH), (1, GROUPS, 1, WIDTH))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    held = [[torch.randn(1, GROUPS, slots, WIDTH).to(dtype) for _ in "kv"] for _ in range(layers)]
    sink = {"sink_logits": torch.randn(1, HEADS, 1), "sink_values": torch.randn(GROUPS, WIDTH)}
    window = (slots, 0) if slots <= 4096 else (None, 0)
    seen = torch.tensor([slots - 1])

    def run() -> None:
        for keys, values in held:
            slot_attention(q, k, v, keys, values, seen, window=window, layout="by_rank", **sink)

    def read() -> None:
        for pair in held:
            for part in pair:
                part.view(torch.float32).sum()

    found = paired_seconds({"attention": run, "reading": read}, rounds=31)
    return {"bytes": size} | {name: round(1e6 * value / layers, 1) for name, value in found.items()}


@torch.inference_mode()
def head(dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of one row times a head of 8 bits, here and by torch's kernel, and of one sum of its codes."""
    held = [torch.randint(-127, 128, HEAD, dtype=torch.int8) for _ in range(3)]  # in turns, more than a cache holds
    x, scales = torch.randn(1, HEAD[1]).to(dtype), torch.rand(HEAD[0]).to(dtype)

    def product(backend: str) -> None:
        for codes in held:
            int8_product(x, codes, scales, backend=backend)

    def read() -> None:
        for codes in held:
            codes.view(torch.float32).sum()

    candidates = {"native": partial(product, "native"), "torch": partial(product, "torch"), "reading": read}
    found = paired_seconds(candidates, rounds=31)
    return {name: round(1e6 * value / len(held), 1) for name, value in found.items()}


def needles(folder: str, files: list[str]) -> dict[str, Any]:
    """Of questions for facts of kinds that no choice of layers has seen, between the lines of real texts, the whole
    answers that are right in every form."""
    texts = real_texts(AutoTokenizer.from_pretrained(folder), files, length=FACT_TOKENS, count=FACT_TEXTS)
    found = {form: answers_of(load(folder, form), texts) for form in FORMS}
    right = {form: sum(each.count("1") for each in answers.values()) for form, answers in found.items()}
    return {"asked": sum(len(text.asked) for text in texts), "tokens": FACT_TOKENS} | right


def add(part: str, name: str, found: Any) -> None:
    file = RESULTS / "compiled_decoding.json"
    figures = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    parts = {key: figures.get(key, {}) for key in ("tokens", "families", "attention", "head", "loss", "needles")}
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
    parser.add_argument("--facts", nargs="+", metavar="FILE", help="real texts: ask for facts between their lines")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, metavar="FAMILY")
    given = machine_arguments(parser)
    if [given.folder is not None, given.attention, given.head, given.families is not None].count(True) != 1:
        parser.error("give FOLDER, --attention, --head, or --families.")
    if given.families is not None:
        for name in given.families:
            add("families", f"{name}, {given.form}", family(name, given.form))
    elif given.attention:
        for dtype in (torch.bfloat16, torch.float32):
            for slots in SLOTS:
                add("attention", f"{slots}, {str(dtype).partition('.')[2]}", attention(slots, dtype))
    elif given.head:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            add("head", str(dtype).partition(".")[2], head(dtype))
    elif given.facts is not None:
        add("needles", Path(given.folder).name, needles(given.folder, given.facts))
    elif given.text is not None:
        found = losses(given.folder, given.text, FORMS, load)
        add("loss", Path(given.folder).name, found)
    else:
        run = partial(token, given.folder, given.form)
        name = f"{Path(given.folder).name}, {given.form}"
        add("tokens", name, beside_llama_cpp(given.llama_cpp, run) if given.llama_cpp else run())


if __name__ == "__main__":
    main()
