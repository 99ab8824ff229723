"""A small checkpoint folder with its tokenizer, and programs that are run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

from _lib.documents import train_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig

from hf_hybrid_ssm.students.initial import student_config
from tests import processes
from tests.students.teachers import SIZES
from tests.tiny_models import config_of

ROOT = Path(__file__).parents[2]
TEXT = "one two three four five six seven eight nine ten"


def save_checkpoint(folder: Path, variant: str = "longhorn", **options) -> Path:
    """A model of the variant, or a "student", with random weights, and a tokenizer."""
    tokenizer = train_tokenizer([TEXT], 290)
    end = tokenizer.eos_token_id
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = (
        student_config(LlamaConfig(**SIZES | tokens), [1], 5) if variant == "student" else config_of(variant, **tokens)
    )
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder


def environment(**more: str) -> dict[str, str]:
    """Of a process that imports these sources."""
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "recipes", ROOT)))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | more


def forked(*arguments: object, **options) -> subprocess.CompletedProcess:
    """Python in a process of its own, where torch is imported already, and transformers unless `options` say no."""
    return processes.run([sys.executable, *arguments], **{"env": environment()} | options)


def python(*arguments: object, python: str = sys.executable, **options) -> subprocess.CompletedProcess:
    """Python in a process of its own from its start, where nothing is imported."""
    options = {"env": environment(), "capture_output": True, "text": True, "check": False} | options
    return subprocess.run([python, *map(str, arguments)], **options)
