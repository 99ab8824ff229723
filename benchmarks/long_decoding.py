"""Does a state drift? A million tokens read one by one in float32, beside the same model in float64, logits at marks.

    python benchmarks/long_decoding.py                          # every variant, hours each on one core
    python benchmarks/long_decoding.py --variants "BST SH"      # one

The float64 model reads the same tokens in pieces of 1,000. Models are tiny and random: what is measured is arithmetic.
Both caches are saved (`save_context`) at each mark and every 50,000 tokens, in runs/long_decoding: the same command
continues a run that was stopped. A variant is in the results from its first mark on.
"""

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.rounds import resident_bytes
from benchmarks.streaming import FAMILIES, SIZES
from benchmarks.timing import RESULTS, machine_arguments, write_results
from hf_hybrid_ssm.serving.context import load_context, save_context

MARKS = (100, 1_000, 10_000, 100_000, 300_000, 1_000_000)
SAVE_EVERY = 50_000
PIECE = 1000
WINDOWS = {"layer_types": ["longhorn", "window_attention"], "sliding_window": 64, "num_attention_heads": 4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Longhorn": ("longhorn", {}),
    "Longhorn, a window in layer 1": ("longhorn", WINDOWS),
    "SPADE, frozen S4": ("spade", {}),
    "SPADE, S5": ("spade", {"ssm_type": "s5", "ssm_state_size": 16}),
    "BST SH": ("bst", {}),
    "BST MF": ("bst", {"context_variant": "mf"}),
    "LMU-ISA": ("lmu_isa", {}),
    "LMU-ISA, window attention": ("lmu_isa", {"first_sublayer": "window_attention", "sliding_window": 64}),
}
FOLDER = Path(__file__).parents[1] / "runs" / "long_decoding"


def model_of(name: str) -> PreTrainedModel:
    family, fields = VARIANTS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **fields}))
    for parameter in model.parameters():
        if parameter.dim() >= 2 and parameter.requires_grad:
            parameter.data.mul_(1.5)  # away from the smooth initial point
    return model.eval()


class Run:
    """A variant's two models and caches, and what was found so far; continues what its folder holds."""

    def __init__(self, name: str, folder: Path):
        model = model_of(name)
        self.models = {"float32": model, "float64": copy.deepcopy(model).double()}
        self.folder, self.progress = folder, folder / "progress.json"
        self.found: dict[str, Any] = {"read": 0, "errors": {}, "megabytes": {}, "seconds": 0.0}
        if self.progress.is_file():
            self.found = json.loads(self.progress.read_text(encoding="utf-8"))
        self.caches = {
            dtype: load_context(self._file(dtype), each).cache
            if self.found["read"]
            else DynamicCache(config=each.config)
            for dtype, each in self.models.items()
        }

    def _file(self, dtype: str) -> Path:
        return self.folder / f"{self.found['read']}-{dtype}.safetensors"

    @torch.inference_mode()
    def read(self, tokens: torch.Tensor, is_mark: bool) -> None:
        """The next tokens (1, L); at a mark also compare the last logits."""
        begin, last = time.perf_counter(), {}
        for (dtype, model), piece in zip(self.models.items(), (1, PIECE)):
            for ids in tokens.split(piece, dim=1):
                logits = model(ids, cache=self.caches[dtype], logits_to_keep=1).logits[0, -1]
            last[dtype] = logits.double()
        self.found["read"] += tokens.shape[1]
        self.found["seconds"] += time.perf_counter() - begin
        if is_mark:
            mark, exact = str(self.found["read"]), last["float64"]
            self.found["errors"][mark] = float((last["float32"] - exact).abs().max() / exact.abs().max())
            self.found["megabytes"][mark] = round(resident_bytes() / 2**20, 1)

    def save(self) -> None:
        """Both caches, then the line that names them, then the earlier ones go."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for dtype, model in self.models.items():
            save_context(self.caches[dtype], self._file(dtype), model, overwrite=True)
        draft = self.progress.with_suffix(".draft")
        draft.write_text(json.dumps(self.found), encoding="utf-8")
        draft.replace(self.progress)
        for file in set(self.folder.glob("*.safetensors")) - {self._file(dtype) for dtype in self.models}:
            file.unlink()


def drift(name: str, marks: tuple[int, ...], folder: Path, record: Callable[[dict[str, Any]], None]) -> None:
    """Calls `record` with all that was found at each mark: by mark `errors` (the largest difference of logits over the
    largest logit) and `megabytes` (resident memory), and `seconds`."""
    run = Run(name, folder)
    tokens = torch.randint(0, SIZES["vocab_size"], (1, marks[-1]), generator=torch.Generator().manual_seed(1))
    for end in sorted({*marks, *range(SAVE_EVERY, marks[-1], SAVE_EVERY)}):
        if end > run.found["read"]:
            run.read(tokens[:, run.found["read"] : end], end in marks)
            run.save()
        if str(end) in run.found["errors"]:
            print(f"  {end:,} tokens: {run.found['errors'][str(end)]:.1e}, {run.found['seconds']:.0f} s", flush=True)
            record(run.found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--tokens", type=int, default=MARKS[-1], help="the last mark")
    parser.add_argument("--quick", action="store_true", help="1,000 tokens, and nothing is kept")
    arguments = machine_arguments(parser, threads=1)
    marks = tuple(mark for mark in MARKS if mark <= (1000 if arguments.quick else arguments.tokens))
    file = RESULTS / "long_decoding.json"
    done = json.loads(file.read_text(encoding="utf-8"))["models"] if file.is_file() and not arguments.quick else {}

    def record(name: str, found: dict[str, Any]) -> None:
        done[name] = {key: found[key] for key in ("errors", "megabytes")} | {"seconds": round(found["seconds"])}
        models = {variant: done[variant] for variant in VARIANTS if variant in done}
        write_results("long_decoding", {"settings": {**SIZES, "window": 64}, "models": models})

    for name in arguments.variants:
        if str(marks[-1]) not in done.get(name, {}).get("errors", {}):
            print(name, flush=True)
            with tempfile.TemporaryDirectory() as nowhere:
                folder = Path(nowhere) if arguments.quick else FOLDER / name.replace(", ", "-").replace(" ", "-")
                drift(name, marks, folder, partial(record, name))


if __name__ == "__main__":
    main()
