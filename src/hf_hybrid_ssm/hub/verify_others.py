"""A folder with a model of transformers' own, checked before transformers reads it: as those of this package are, but
for the names of tensors, which transformers may change as it loads them (`load_whole` compares them then).

Nothing that the folder names is fetched or run, nothing outside of it is read, and nothing is unpickled.
"""

import re
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from hf_hybrid_ssm.hub.configurations import config_of_folder, without_memory
from hf_hybrid_ssm.hub.reading import check_readable, read_any_json
from hf_hybrid_ssm.hub.verify_files import ADAPTER_CONFIG, tensors_of, weight_files
from hf_hybrid_ssm.hub.verify_tensors import check_dtype, check_generation
from hf_hybrid_ssm.hub.verify_tokenizer import check_steps

PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
"""Files that transformers reads instead of those that are named as usual, whatever tensors they lack."""


def check_texts(folder: Path) -> PreTrainedConfig:
    """The configuration of a folder all of whose texts can be read: it names no code, asks for no more than can be
    built, and no other model; the tokenizer's steps multiply no text.

    Raises:
        ValueError: names the file and says what is wrong with it.
    """
    config = config_of_folder(folder, of_transformers=True)
    check_readable(folder)
    for path in sorted(folder.glob("*.json")):
        read_any_json(path)
    if (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} is an adapter beside a model: merge it into the model (merge_and_unload of "
            "peft) and save that."
        )
    if (folder / "tokenizer.json").is_file():
        check_steps(folder / "tokenizer.json")
    check_generation(folder)
    return config


def check_safetensors(folder: Path, config: Any) -> None:
    """The weights are complete safetensors, and hold numbers of the kind that the causal language model needs.

    Raises:
        ValueError: names the file or the tensor.
    """
    names = sorted(path.name for path in folder.iterdir())
    if shards := [name for name in names if SHARD.fullmatch(name)]:
        raise ValueError(
            f"{folder / shards[0]} is a part of a checkpoint that several processes saved: load it there, and save it "
            "whole."
        )
    first = next(iter(weight_files(folder)))
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if first not in names and pickled:
        raise ValueError(
            f"{folder / pickled[0]} holds pickled weights, which are not read: load them where you trust them, and "
            "save the model as safetensors (save_pretrained)."
        )
    places = tensors_of(folder)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or getattr(config, "quantization_config", None) is not None:
        return
    expected = without_memory(lambda: model_class(config)).state_dict()
    for file, tensors in places.items():
        for name in sorted(expected.keys() & tensors.keys()):
            check_dtype(folder / file, name, tensors[name][1], expected[name].dtype, model_class.__name__)
