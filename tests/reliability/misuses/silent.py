"""Mistakes that raise nothing, as everywhere in transformers: told here, and held to be still so."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.reliability.misuses.files import CONFIG, checkpoint, json_of, tensors_of
from tests.reliability.misuses.inputs import IDS, mask, model


def _report(change: Callable[[Path], object], kind: str) -> Callable[[Path], None]:
    """Loads a changed folder; the loading report must name what differs."""

    def load(folder: Path) -> None:
        _, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert told[kind], f"the loading report has no {kind}"

    return checkpoint(change, load)


def _unknown_field(folder: Path) -> None:
    config = AutoConfig.for_model("longhorn", hiden_size=64)
    assert config.hiden_size == 64
    assert "hiden_size" in json.loads(config.to_json_string())


def _misspelt_argument(folder: Path) -> None:
    assert torch.equal(model()(IDS, atention_mask=mask(2, 6) * 0).logits, model()(IDS).logits)
    try:
        model().generate(IDS, atention_mask=mask(2, 6), max_new_tokens=1)
    except ValueError as error:
        assert "atention_mask" in str(error)
    else:
        raise AssertionError("generate took it")


def _row_of_padding(folder: Path) -> None:
    beside = model()(IDS, mask(2, 6) * torch.tensor([[0], [1]])).logits[1]
    torch.testing.assert_close(beside, model()(IDS[1:]).logits[0])


def _too_many_logits(folder: Path) -> None:
    assert model()(IDS, logits_to_keep=99).logits.shape[1] == IDS.shape[1]


# what is done, provoke, what happens
SILENT: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "an argument of `forward` that is misspelt",
        _misspelt_argument,
        "it is passed on and read by nobody; `generate` refuses it",
    ),
    ("a configuration's field that is misspelt", _unknown_field, "it is stored and read by nobody"),
    (
        "a special token beyond the vocabulary",
        lambda folder: AutoConfig.for_model("longhorn", vocab_size=9, eos_token_id=50256),
        "generation never meets it",
    ),
    (
        "a tensor that the checkpoint lacks",
        _report(tensors_of(lambda tensors: tensors.pop("model.norm.weight")), "missing_keys"),
        "it gets its initial values; the loading report names it",
    ),
    (
        "a tensor that the model does not have",
        _report(tensors_of(lambda tensors: tensors.update(more=torch.zeros(1))), "unexpected_keys"),
        "it is left out; the loading report names it",
    ),
    (
        "fewer layers in config.json than in the weights",
        _report(json_of(CONFIG, num_hidden_layers=1, block_types=["linear_attention"]), "unexpected_keys"),
        "the others are left out; the loading report names their tensors",
    ),
    (
        "a row of padding alone",
        _row_of_padding,
        "its outputs mean nothing; the other rows are not touched by it",
    ),
    (
        "more logits to keep than there are tokens",
        _too_many_logits,
        "all are kept",
    ),
]
