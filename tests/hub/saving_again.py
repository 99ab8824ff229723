"""Saving what was loaded from a folder that carries its code, in each way that transformers has.

    python saving_again.py save SOURCE TARGET          as somebody who lacks the package
    python saving_again.py load FOLDER [FOLDER ...]    whatever was saved can be loaded

Next to a saved folder lies what its model answers (`FOLDER.answers`).
"""

import sys

if __name__ == "__main__":  # whatever is installed: importing it fails here
    sys.modules["hf_hybrid_ssm"] = None  # type: ignore[assignment]

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

IDS = torch.arange(3, 27).view(2, 12)
ONLY_CONFIGURATION = ("configuration", "pushed configuration", "configuration pushed on saving")


def auto_class(folder: Path) -> type:
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return AutoModelForSeq2SeqLM if fields.get("is_encoder_decoder") else AutoModelForCausalLM


def logits(model: PreTrainedModel) -> torch.Tensor:
    inputs = {"decoder_input_ids": IDS[:, :4]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **inputs).logits


class Hub:
    """What would be uploaded lies in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True)

    def create_commit(self, repo_id: str, operations: list, **options: object) -> None:
        for operation in operations:
            shutil.copyfile(operation.path_or_fileobj, self.folder / operation.path_in_repo)

    def upload_folder(self, *, folder_path: str, ignore_patterns: list[str], **options: object) -> mock.Mock:
        assert list(Path(folder_path).glob("modeling_*.py"))
        for path in Path(folder_path).iterdir():
            if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in ignore_patterns):
                shutil.copyfile(path, self.folder / path.name)
        return mock.Mock()  # an upload that is done

    def create_repo(self, repo_id: str, **options: object) -> mock.Mock:
        return mock.Mock(repo_id=repo_id)

    def __enter__(self) -> None:
        names = ("create_commit", "upload_folder", "create_repo")
        self.patches = [mock.patch.object(HfApi, name, getattr(self, name)) for name in names]
        self.patches.append(mock.patch.object(ModelCard, "load", _local_card))
        for patch in self.patches:
            patch.start()

    def __exit__(self, *error: object) -> None:
        for patch in self.patches:
            patch.stop()


def _local_card(place: object, **options: object) -> ModelCard:
    """transformers first asks for the repository's card, for minutes where there is no network."""
    if not Path(str(place)).is_file():
        raise LocalEntryNotFoundError(f"{place} has no card")
    return ModelCard(Path(str(place)).read_text(encoding="utf-8"))


def save_in_every_way(source: Path, target: Path) -> None:
    """Fills a folder of each way below `target`."""
    model = auto_class(source).from_pretrained(source, trust_remote_code=True)
    model.save_pretrained(target / "model")
    with Hub(target / "pushed model"):
        model.push_to_hub("me/model")
    with Hub(target / "model pushed on saving"):
        model.save_pretrained(target / "here", push_to_hub=True, repo_id="me/model")
    model.config.save_pretrained(target / "configuration")
    with Hub(target / "pushed configuration"):
        model.config.push_to_hub("me/configuration")
    with Hub(target / "configuration pushed on saving"):
        model.config.save_pretrained(str(target / "here too"), push_to_hub=True, repo_id="me/configuration")
    for name in ("model", "pushed model", "model pushed on saving"):
        save_file({"logits": logits(model)}, target / f"{name}.answers")

    settings = TrainingArguments(
        str(target / "trained"), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=2, push_to_hub=True, hub_model_id="me/trained",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in IDS.tolist()]
    with Hub(target / "pushed by trainer"):
        trainer = Trainer(model, settings, train_dataset=rows)
        trainer.save_model()
        trainer.train()
        trainer.push_to_hub()
    for name in ("trained", "trained/checkpoint-1", "pushed by trainer"):
        save_file({"logits": logits(model)}, target / f"{name}.answers")


def saved_folders(target: Path) -> list[Path]:
    """The folders that `save_in_every_way` filled."""
    with_weights = [path.with_suffix("") for path in target.rglob("*.answers")]
    return sorted(with_weights) + [target / name for name in ONLY_CONFIGURATION]


def check_loading(folder: Path) -> None:
    auto = auto_class(folder)
    if folder.name in ONLY_CONFIGURATION:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = auto.from_config(config, trust_remote_code=True)
        assert logits(model).isfinite().all()
    else:
        model = auto.from_pretrained(folder, trust_remote_code=True)
        torch.testing.assert_close(logits(model), load_file(folder.with_suffix(".answers"))["logits"])
    is_exported = type(model).__module__.startswith("transformers_modules")
    assert is_exported == (sys.modules["hf_hybrid_ssm"] is None), type(model)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "save":
        save_in_every_way(*map(Path, arguments))
    else:
        for argument in arguments:
            check_loading(Path(argument))
