"""The models of long_context.py, as folders: a teacher, and students that `upcycle` makes of it."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_hybrid_ssm.upcycle import Keep, Teacher, load_teacher, upcycle
from hf_hybrid_ssm.upcycle.choice import evenly_spaced

TEACHER = "teacher"
FULL_LAYERS = 6  # that keep attention to all tokens
FULL_GROUPS = 9  # key/value groups that keep it, each in a layer of its own
STUDENTS: dict[str, dict[str, Any]] = {
    "bst-256": {"keep": 0, "window": 256, "memory": "context"},
    "bst-512": {"keep": 0, "window": 512, "memory": "context"},
    "longhorn": {"memory": "longhorn", "instead": True},
    "windows": {"window": 256},
    "windows-alone": {"keep": 0, "window": 256},
    "groups": {"keep": FULL_GROUPS, "window": 256},
}
"""Name → how many layers, or key/value groups, see all tokens, evenly spaced, which costs no time; the window; and
arguments of `upcycle`."""
CONTEXT_LAYERS = (0, 6, 8)  # of 30: those that have states in a BST
RANDOM = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
"""Sizes of SmolLM2-135M."""


def teacher_of(source: str | None) -> PreTrainedModel:
    """From a folder or GGUF file, in float32; None: random weights of SmolLM2-135M's shape."""
    if source is not None:
        return load_teacher(source, dtype=torch.float32).model
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**RANDOM)).eval()


def student_of(teacher: PreTrainedModel, name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    options, layers = dict(STUDENTS[name]), range(teacher.config.num_hidden_layers)
    parts: Any = evenly_spaced(layers, min(options.pop("keep", FULL_LAYERS), len(layers)))
    if name == "groups":
        parts = [(layer, 0) for layer in parts]
    if options.get("memory") == "context":
        options["memory_layers"] = [layer for layer in CONTEXT_LAYERS if layer in layers]
    keep = Keep(parts, window=options.pop("window", 256))
    return upcycle(Teacher(teacher), keep, sink="constant", **options)[0].eval()


def make_folders(source: str | None, names: list[str], dtypes: list[str], folder: Path) -> dict[tuple[str, str], Path]:
    """Name and dtype → the folder of its weights, each made unless it is there.

    One for each dtype: a file whose weights are converted when they are loaded would stay in memory beside them.
    """
    for name in names:
        _once(folder / f"{name}-float32", partial(_made, source, name, folder))
        for dtype in set(dtypes) - {"float32"}:
            _once(folder / f"{name}-{dtype}", partial(_loaded, folder / f"{name}-float32", dtype))
    return {(name, dtype): folder / f"{name}-{dtype}" for name in names for dtype in {*dtypes, "float32"}}


def _made(source: str | None, name: str, folder: Path) -> PreTrainedModel:
    if name == TEACHER:
        return teacher_of(source)
    _once(folder / f"{TEACHER}-float32", partial(teacher_of, source))
    return student_of(_loaded(folder / f"{TEACHER}-float32", "float32"), name)


def _loaded(folder: Path, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _once(place: Path, make: Callable[[], PreTrainedModel]) -> None:
    if place.is_dir():
        return
    print(f"making {place.name}", flush=True)
    draft = place.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    make().save_pretrained(draft)
    draft.rename(place)
