"""Folders that somebody made to harm who opens them: each function changes a good one, and says what a refusal must
say, and which commands must refuse; the others must end as usual. `outside` is a folder that no command may touch.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

READING = ("check", "generate", "read")
CHECKING = (*READING, "card", "export")
ALL = (*CHECKING, "plan")


class Hostile(NamedTuple):
    name: str
    change: Callable[[Path, Path], None]
    message: str
    refusing: tuple[str, ...]


def edited(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _of(file: str, refusing: tuple[str, ...], message: str, **fields: object) -> Hostile:
    shown = ", ".join(f"{name}={value!r}"[:60] for name, value in fields.items())
    return Hostile(shown, lambda folder, _: edited(folder / file, **fields), message, refusing)


_of_config = partial(_of, "config.json", ALL)
_of_tokenizer = partial(_of, "tokenizer.json", READING)
_of_weights = partial(_of, "config.json", CHECKING)


def _pipe(name: str, refusing: tuple[str, ...], message: str = "not a regular file") -> Hostile:
    def change(folder: Path, _: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return Hostile(f"{name} is a pipe", change, f"{name}.*{message}", refusing)


def _link(name: str, target: str, refusing: tuple[str, ...], message: str) -> Hostile:
    """A link to a device, or to `outside`, where what the folder had under that name lies now."""

    def change(folder: Path, outside: Path) -> None:
        if (folder / name).is_file() and target == name:
            shutil.move(folder / name, outside / name)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target if os.path.isabs(target) else outside / target)

    return Hostile(f"{name} links to {target}", change, f"{name}.*{message}", refusing)


def _deep(name: str, refusing: tuple[str, ...]) -> Hostile:
    def change(folder: Path, _: Path) -> None:
        (folder / name).write_text('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}")

    return Hostile(f"{name} is deep", change, f"{name}.*nested too deeply", refusing)


def _weights(dtype: torch.dtype, stored: str) -> Hostile:
    def change(folder: Path, _: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        first = sorted(tensors)[0]
        save_file(tensors | {first: tensors[first].to(dtype)}, file, metadata={"format": "pt"})

    return Hostile(f"weights of {dtype}", change, f"has dtype {stored}, but .* needs BF16", READING)


def _part(folder: Path, _: Path) -> None:
    """`generate` would read one tensor, and the usual file is whole."""
    name = "model.norm.weight"
    save_file({name: load_file(folder / "model.safetensors")[name]}, folder / "other.safetensors")
    edited(folder / "config.json", transformers_weights="other.safetensors")


def _adapter(kind: str, message: str) -> Hostile:
    def change(folder: Path, _: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))

    return Hostile(f"an adapter of {kind} without weights", change, message, CHECKING)


def _card_from_outside(folder: Path, outside: Path) -> None:
    (outside / "private.json").write_text('{"secret": "s3cret"}')
    (folder / "results.json").symlink_to(outside / "private.json")


def _long_text(folder: Path, _: Path) -> None:
    with (folder / "notes.json").open("wb") as file:
        file.truncate(2**40)  # takes no room


def _empty_index(folder: Path, _: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {}}))


def _templates(folder: Path, outside: Path) -> None:
    (outside / "templates").mkdir(exist_ok=True)
    (outside / "templates" / "default.jinja").write_text("s3cret")
    (folder / "additional_chat_templates").symlink_to(outside / "templates")


def _template(folder: Path, outside: Path) -> None:
    (outside / "private.jinja").write_text("s3cret")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "default.jinja").symlink_to(outside / "private.jinja")


PADDING = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
PADDING |= {"pad_type_id": 0, "pad_token": "x"}
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
INSIDE = "which transformers has inside"
HOSTILE = (
    _of_config(INSIDE, _attn_implementation="kernels-community/flash-attn2"),
    _of_config(INSIDE, _attn_implementation="someone/anything@v1:function"),
    _of_config(INSIDE, attn_implementation="someone/anything"),
    _of_config(INSIDE, _attn_implementation={"": "someone/anything"}),
    _of_config(INSIDE, _attn_implementation="flash_attention_2"),  # which transformers would fetch where it is missing
    _of_config(INSIDE, _experts_implementation="sonicmoe"),
    _of_config(INSIDE, inner={"attn_implementation": "someone/anything"}),
    _of_config("a part of", attribute_map={"hidden_act": "_attn_implementation"}),
    _of_config("a part of", validate_architecture="x"),
    _of_config("configuration_files", configuration_files=["config.4.0.0.json"]),
    _of_config("num_hidden_layers=100000 is beyond", num_hidden_layers=10**5),
    _of_config("num_hidden_layers=1000000000 is beyond", num_hidden_layers=10**9),
    _of_config("num_labels=1000000000 is beyond", num_labels=10**9),
    _of_config("entries", eos_token_id=[1] * 10**6),
    _of_config("entries", anything=[1] * 2 * 10**5),
    _of_config("letters", hidden_act="x" * 10**6),
    _of_config("config.json", hidden_size="wide"),
    _of_config("config.json", num_hidden_layers=2.5),
    _of_config("config.json", layer_types=3),
    _of_config("config.json", architectures=3),
    _of_config("config.json", dtype="float99"),
    _of_config("config.json", id2label={"a": "b"}),
    _of_config("config.json", rope_parameters="x"),
    _of_config("config.json", model_type=["longhorn"]),
    _deep("config.json", ALL),
    _deep("notes.json", ("check", "generate", "read")),
    _deep("tokenizer_config.json", READING),
    _deep("results.json", (*READING, "card")),
    _of_tokenizer("normalizer can make more", normalizer={"type": "Sequence", "normalizers": [GROWING] * 9}),
    _of_tokenizer("decoder can make more", decoder={"type": "Sequence", "decoders": [GROWING] * 9}),
    _of_tokenizer("normalizer cannot be read", normalizer={"type": "Replace"}),
    _of_tokenizer("pads each text to 1,000,000,000", padding=PADDING),
    _of("generation_config.json", READING, "num_beams=1000000000 is beyond", num_beams=10**9),
    _weights(torch.int8, "I8"),
    _weights(torch.bool, "BOOL"),
    _weights(torch.int64, "I64"),
    Hostile("an index of nothing", _empty_index, "index.json has an empty weight_map", CHECKING),
    Hostile("transformers_weights names a part", _part, "left from another save", READING),
    _of_weights("missing.safetensors is missing", transformers_weights="missing.safetensors"),
    _of_weights("config.json.*must name a file of the folder", transformers_weights="../other.safetensors"),
    _of_weights("config.json.*must name a file of the folder", transformers_weights="other.bin"),
    _adapter("LORA", "adapter_model.safetensors is missing"),
    _adapter("XLORA", "peft_type='XLORA'"),  # which names other adapters
    _pipe("config.json", ALL),
    _pipe("model.safetensors", CHECKING),
    _pipe("notes.json", CHECKING),
    _pipe("x.py", CHECKING, "not a regular file|was not written by"),
    _pipe("README.md", CHECKING),
    _pipe("results.json", CHECKING),
    _pipe("tokenizer.json", CHECKING),
    _pipe("SHA256SUMS", CHECKING),
    _link("notes.json", "/dev/zero", CHECKING, "not a regular file"),
    _link("x.py", "/dev/zero", CHECKING, "not a regular file|was not written by"),
    _link("config.json", "/dev/zero", ALL, "not a regular file"),
    _link("config.json", "config.json", ALL, "leads out of its folder"),
    _link("model.safetensors", "model.safetensors", CHECKING, "leads out of its folder"),
    _link("tokenizer.json", "tokenizer.json", CHECKING, "leads out of its folder"),
    _link("README.md", "new.md", CHECKING, "cannot be read"),  # git carries such links
    _link("README.md", "README.md", CHECKING, "leads out of its folder|cannot be read"),
    _link("configuration_longhorn.py", "new.py", CHECKING, "cannot be read"),
    Hostile("results.json is private", _card_from_outside, "results.json.*leads out", CHECKING),
    Hostile("templates lie elsewhere", _templates, "additional_chat_templates is a link that leads out", CHECKING),
    Hostile("a template lies elsewhere", _template, "default.jinja is a link that leads out", CHECKING),
    Hostile("notes.json is endless", _long_text, "notes.json has more than", CHECKING),
)
