"""What somebody does with exported folders who has transformers and torch, and not this package.

    python without_package.py FOLDER [FOLDER ...]

Loads each with `trust_remote_code=True`, answers, trains two steps, saves, loads that, and leaves in FOLDER/answers
what it got. Weights that a wrapper saved are refused.
"""

import shutil
import sys

if __name__ == "__main__":  # whatever is installed: importing it fails here
    sys.modules["hf_hybrid_ssm"] = None  # type: ignore[assignment]

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)


def answer(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and greedy text; weights mapped from a file could round otherwise than those in memory of their own."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    inputs = {"decoder_input_ids": ids[:, :4]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits = model(input_ids=ids, **inputs).logits
        text = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return {"logits": logits, "text": text}


def train(model: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model.train()(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return losses


@torch.no_grad()
def check_smoothed_labels(model: torch.nn.Module, ids: torch.Tensor, folder: Path) -> None:
    """A Trainer compares logits with the next token where a table has the name of the class."""
    options = TrainingArguments(str(folder / "smoothed"), report_to="none", use_cpu=True, label_smoothing_factor=0.1)
    seen = Trainer(model, options).compute_loss(model, {"input_ids": ids, "labels": ids})
    surprise = -model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    wanted = 0.9 * surprise.gather(-1, ids[:, 1:, None]).mean() + 0.1 * surprise.mean()
    torch.testing.assert_close(seen, wanted)


def check_wrapped_weights_are_refused(folder: Path, auto: type) -> None:
    file = folder / "model.safetensors"
    save_file({f"module.{name}": value for name, value in load_file(file).items()}, file, {"format": "pt"})
    try:
        auto.from_pretrained(folder, trust_remote_code=True)
    except ValueError as error:
        assert "was saved from a wrapper, as its 'module." in str(error), error
    else:
        raise AssertionError(f"{folder} was loaded with random weights")


def main(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules")
    ids = torch.arange(3, 27).view(2, 12)
    found = answer(model, ids)
    if not config.is_encoder_decoder:
        check_smoothed_labels(model, ids, folder)
    losses = train(model, ids)
    assert losses[-1] < losses[0], losses
    trained = answer(model, ids)
    again_folder = folder / "again"
    model.save_pretrained(again_folder)
    again = answer(auto.from_pretrained(again_folder, trust_remote_code=True).eval(), ids)
    assert torch.equal(again["logits"], trained["logits"]) and torch.equal(again["text"], trained["text"])
    if "AutoModelForSequenceClassification" in config.auto_map:
        options = {"trust_remote_code": True, "num_labels": 3}
        classifier = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
        assert classifier(input_ids=ids).logits.shape == (2, 3)
    check_wrapped_weights_are_refused(Path(shutil.copytree(again_folder, folder / "wrapped")), auto)
    save_file(found, folder / "answers")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
