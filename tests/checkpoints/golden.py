"""A checkpoint says what its golden.json holds; run as a script, by the code that its folder carries.

python golden.py FOLDER [FOLDER ...]
"""

import sys

if __name__ == "__main__":  # whatever is installed: importing it fails here
    sys.modules["hf_hybrid_ssm"] = None  # type: ignore[assignment]

import json
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

AUTO_CLASSES = {
    "CausalLM": AutoModelForCausalLM,
    "MaskedLM": AutoModelForMaskedLM,
    "ConditionalGeneration": AutoModelForSeq2SeqLM,
}


def loaded(folder: Path, **options):
    """The checkpoint in float32, its tokenizer, and what its objective is."""
    config = AutoConfig.from_pretrained(folder, **options)
    objective = config.architectures[0].partition("For")[2]
    tokenizer = AutoTokenizer.from_pretrained(folder, config=config)
    model = AUTO_CLASSES[objective].from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval(), tokenizer, objective


def check_golden(folder: Path, **options) -> str:
    """An AssertionError if logits or greedy text differ; the module of the model's class."""
    known = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
    model, tokenizer, objective = loaded(folder, **options)
    ids = torch.tensor([known["input_ids"]])
    assert tokenizer.decode(ids[0, 1:] if objective == "CausalLM" else ids[0]) == known["prompt"]
    attention = {"attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        if objective == "MaskedLM":
            logits = model(ids).logits[ids == tokenizer.mask_token_id][0]
        elif objective == "CausalLM":
            logits = model(ids).logits[0, -1]
        else:
            start = torch.tensor([[model.config.decoder_start_token_id]])
            logits = model(ids, decoder_input_ids=start).logits[0, -1]
    torch.testing.assert_close(logits[::64], torch.tensor(known["every_64th_logit"]), atol=1e-3, rtol=1e-3)
    if objective == "MaskedLM":
        text = tokenizer.decode([logits.argmax()])
    else:
        count, shown = (32, ids.shape[1]) if objective == "CausalLM" else (24, 0)
        written = model.generate(ids, **attention, max_new_tokens=count, do_sample=False)
        text = tokenizer.decode(written[0, shown:])
    assert text == known["greedy"]
    return type(model).__module__


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        module = check_golden(Path(argument), trust_remote_code=True)
        assert module.startswith("transformers_modules"), module
