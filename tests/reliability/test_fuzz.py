"""Random configurations.

A legal configuration must build, train a step with a finite loss and finite gradients, generate three tokens where it
can, and come back from its folder with every tensor and every logit bit-equal. One crossed from two legal ones must
live in this way too, or be refused by an exception that names a field, no later than when the model is built.
"""

from pathlib import Path
from random import Random

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel

import hf_hybrid_ssm
from hf_hybrid_ssm.models import FAMILIES as DECLARED
from tests.memory import in_own_memory
from tests.reliability.drawing import Fields, crossed, legal
from tests.reliability.test_roundtrips import differences
from tests.reporting import THOROUGH

pytestmark = pytest.mark.filterwarnings("ignore")
HEADS = {family.model_type: family.heads for family in DECLARED}
CASES = 60 if THOROUGH else 4  # for each family, legal ones and crossed ones
SEED = 0 if THOROUGH else 101


def class_for(model_type: str, fields: Fields, random: Random) -> type[PreTrainedModel]:
    """A class that these fields can build: a generating one most of the time. (Other heads are in tests/programs.)"""
    heads = HEADS[model_type]
    classifies = heads["MODEL_FOR_SEQUENCE_CLASSIFICATION"]
    generates = heads.get("MODEL_FOR_CAUSAL_LM") or heads["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM"]
    masked = heads.get("MODEL_FOR_MASKED_LM", classifies)
    if fields.get("pixel_input") or fields.get("paired_input"):
        name = classifies
    elif fields.get("bidirectional"):
        name = random.choice([classifies, masked])
    elif fields.get("adaptive_cutoffs"):
        name = generates
    else:
        name = random.choice([generates, generates, classifies])
    return getattr(hf_hybrid_ssm, name)


def built(model_type: str, fields: Fields, random: Random) -> PreTrainedModel:
    torch.manual_seed(random.randrange(2**31))
    return class_for(model_type, fields, random)(AutoConfig.for_model(model_type, **fields))


def live(model: PreTrainedModel, fields: Fields, random: Random, folder: Path) -> None:
    """Train a step, generate, save, load."""
    read, learnt = _inputs(model, fields, random)
    _train(model, read, learnt)
    model.eval()
    if model.can_generate():
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": random.random() < 0.5, "pad_token_id": 0}
        out = model.generate(**read, **options)
        begun = 1 if model.config.is_encoder_decoder else read["input_ids"].shape[1]
        assert out.shape == (2, begun + 3), f"generated {tuple(out.shape)}"
    model.save_pretrained(folder)
    _same(model, type(model).from_pretrained(folder).eval(), read)


def _inputs(model: PreTrainedModel, fields: Fields, random: Random) -> tuple[dict, dict]:
    """What the model reads, and what it is to learn (nothing where there is no next token)."""
    length = random.randint(1, 9)
    shape = (2, 2, length) if fields.get("paired_input") else (2, length)
    ids = torch.randint(3, fields["vocab_size"], shape)
    mask = torch.ones_like(ids)
    mask[0, ..., : random.randrange(length)] = 0  # left padding, as generation has it
    read, kind, classes = {"input_ids": ids, "attention_mask": mask}, type(model).__name__, fields["num_labels"]
    if "Classification" in kind:
        return read, {"labels": torch.rand(2) if classes == 1 else torch.randint(0, classes, (2,))}
    labels = ids.masked_fill(mask == 0, -100)
    targets = labels if model.config.is_encoder_decoder else labels[:, 1:]
    return read, {"labels": labels} if (targets != -100).any() else {}


def _train(model: PreTrainedModel, read: dict, learnt: dict) -> None:
    if not learnt:
        return
    loss = model.train()(**read, **learnt).loss
    assert torch.isfinite(loss), f"the loss is {loss.item()}"
    loss.backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    assert trained and all(torch.isfinite(p.grad).all() for p in trained), "a gradient is missing or not finite"
    torch.optim.SGD(trained, lr=1e-3).step()


def _same(model: PreTrainedModel, loaded: PreTrainedModel, read: dict) -> None:
    assert list(differences(model, loaded)) == []
    if model.config.is_encoder_decoder and model.can_generate():
        read = read | {"decoder_input_ids": read["input_ids"]}
    with torch.no_grad():
        left, right = (one(**read, return_dict=False, use_cache=False)[0] for one in (model, in_own_memory(loaded)))
    assert torch.isfinite(left).all(), "a logit is not finite"
    assert torch.equal(left, right), "logits differ after loading"


@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.parametrize("family", HEADS)
def test_legal_configurations_live(family, number, tmp_path):
    random = Random(f"{SEED} {family} {number}")
    fields = legal(family, random)
    live(built(family, fields, random), fields, random, tmp_path)


@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.parametrize("family", HEADS)
def test_crossed_configurations_live_or_are_refused_by_name(family, number, tmp_path):
    random = Random(f"{SEED} {family} {number}")
    fields = crossed(family, random)
    try:
        model = built(family, fields, random)
    except (ValueError, StrictDataclassError) as error:
        assert any(name in str(error) for name in fields), f"no field is named: {error}, with {fields}"
    else:
        live(model, fields, random, tmp_path)
