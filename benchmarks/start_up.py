"""How long does `import hf_hybrid_ssm` take on top of torch and transformers, the first forward of each family, with
and without compiled kernels at hand, and `from_pretrained` of a large preset?

Each figure is of a process of its own; imports and loading are medians of three. "first" is the first forward of a
small model, which loads kernels (compiled before, or now) and checks them; "second" is the next one. Loading is
compared with reading the tensors of the same file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from timing import machine_arguments, write_results

ROUNDS = 3
SHARE_OF_MEMORY = 0.2  # of what is available, for the weights of the preset
LARGEST = 4e9  # bytes; it is written to a temporary folder
# what anybody who loads a model has imported anyway
BASE = "import torch; from transformers import AutoModelForCausalLM, PreTrainedModel"
PROBE = """
import json, resource, time
{base}
torch.set_num_threads({threads})
begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import hf_hybrid_ssm
{use}
megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(json.dumps({{"seconds": time.perf_counter() - begin, "megabytes": megabytes}}))
"""
USES = {
    "import": "",
    "import and build a config": "from transformers import AutoConfig; AutoConfig.for_model('longhorn')",
    "import and a first small model": (
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "config = AutoConfig.for_model('longhorn', vocab_size=50, hidden_size=16, num_hidden_layers=1, "
        "bos_token_id=0, eos_token_id=0, pad_token_id=0)\n"
        "import torch\nAutoModelForCausalLM.from_config(config)(torch.zeros(1, 4, dtype=torch.long))"
    ),
}
FORWARD = """
import json, sys, time
sys.path.insert(0, {benchmarks!r})
import torch
from timing.models import build
torch.set_num_threads({threads})
model, ids = build({name!r}, 256, 2, device={device!r}), torch.zeros(1, 512, dtype=torch.long, device={device!r})
seconds = {{}}
for which in ("first", "second"):
    begin = time.perf_counter()
    with torch.inference_mode():
        model(ids).logits.sum().item()
    seconds[which] = time.perf_counter() - begin
print(json.dumps(seconds))
"""
SAVE = """
import json
from hf_hybrid_ssm.planning.presets import meta_model, preset_config
model = meta_model(preset_config({preset!r})).to_empty(device="cpu")
for tensor in (*model.parameters(), *model.buffers()):
    tensor.data.zero_()
model.save_pretrained({folder!r})
print(json.dumps({{"class": type(model).__name__}}))
"""
LOAD = """
import glob, json, time
import torch, hf_hybrid_ssm
from safetensors.torch import load_file
torch.set_num_threads({threads})
cls = getattr(hf_hybrid_ssm, {name!r})
def read():
    return [load_file(path) for path in glob.glob({folder!r} + "/*.safetensors")]
read()
begin = time.perf_counter(); read(); middle = time.perf_counter()
cls.from_pretrained({folder!r}).to({device!r})
print(json.dumps({{"reading the tensors": middle - begin, "from_pretrained": time.perf_counter() - middle}}))
"""


def probe(code: str, environment: Mapping[str, str] = os.environ) -> dict:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def medians(code: str, rounds: int, environment: Mapping[str, str] = os.environ) -> dict[str, float]:
    runs = [probe(code, environment) for _ in range(rounds)]
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}


def first_forwards(device: str, threads: int) -> dict:
    """Of every family, with an empty cache of kernels and with the one that this leaves."""
    from timing.models import FAMILIES

    figures = {}
    for name in FAMILIES:
        options = {"benchmarks": str(Path(__file__).parent), "name": name, "device": device, "threads": threads}
        code = FORWARD.format(**options)
        with tempfile.TemporaryDirectory() as folder:
            caches = {"HF_HYBRID_SSM_CACHE": f"{folder}/native", "TRITON_CACHE_DIR": f"{folder}/triton"}
            cold = probe(code, os.environ | caches)
            warm = medians(code, 1, os.environ | caches)
        figures[name] = {"first, nothing compiled": round(cold["first"], 3), **warm}
    return figures


def largest_preset() -> tuple[str, int]:
    """The name and bytes of the largest preset of a language model whose weights fit."""
    from hf_hybrid_ssm.planning.presets import is_classifier, meta_model, preset_config, preset_names

    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit = min(LARGEST, SHARE_OF_MEMORY * available)
    sizes = {}
    for name in preset_names():
        config = preset_config(name)
        if not is_classifier(config):
            sizes[name] = sum(4 * weight.numel() for weight in meta_model(config).parameters())
    return max(((name, size) for name, size in sizes.items() if size <= limit), key=lambda found: found[1])


def loading(rounds: int, device: str, threads: int) -> dict:
    preset, size = largest_preset()
    with tempfile.TemporaryDirectory() as folder:
        name = probe(SAVE.format(preset=preset, folder=folder))["class"]
        code = LOAD.format(name=name, folder=folder, device=device, threads=threads)
        return {"preset": preset, "megabytes": round(size / 1e6), "seconds": medians(code, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, imports alone")
    arguments = machine_arguments(parser)
    rounds, options = (1 if arguments.quick else ROUNDS), (arguments.device, arguments.threads)
    imports = {
        name: medians(PROBE.format(base=BASE, use=use, threads=arguments.threads), rounds)
        for name, use in USES.items()
    }
    figures: dict = {"on top of torch and transformers": imports}
    if not arguments.quick:
        figures["first forward"] = first_forwards(*options)
        figures["largest preset"] = loading(rounds, *options)
    write_results("start_up", figures, arguments.device)


if __name__ == "__main__":
    main()
