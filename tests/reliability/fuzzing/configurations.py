"""What a drawn configuration must do: live through a small life if it is legal, be refused by name if it is not."""

import warnings
from pathlib import Path
from random import Random

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel

import hf_hybrid_ssm
from hf_hybrid_ssm.auto import FAMILIES
from tests.memory import in_own_memory
from tests.reliability.fuzzing.drawing import Fields, broken, crossed, legal

HEADS = {family.model_type: family.heads for family in FAMILIES}


def class_for(model_type: str, fields: Fields, random: Random) -> type[PreTrainedModel]:
    """A class that these fields can build: a generating one most of the time."""
    heads = HEADS[model_type]
    classifies = heads["MODEL_FOR_SEQUENCE_CLASSIFICATION"]
    generates = heads.get("MODEL_FOR_CAUSAL_LM") or heads["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM"]
    if fields.get("bidirectional") or fields.get("pixel_input") or fields.get("paired_input"):
        name = classifies
    elif fields.get("adaptive_cutoffs"):
        name = generates
    else:
        others = (heads["MODEL_FOR_TOKEN_CLASSIFICATION"], heads["MODEL_FOR_QUESTION_ANSWERING"])
        name = random.choice([generates] * 4 + [classifies] * 2 + [*others])
    return getattr(hf_hybrid_ssm, name)


def live(model_type: str, fields: Fields, random: Random, folder: Path) -> str:
    """Build, train a step, generate, save, load; returns the class, raises AssertionError where something is off."""
    torch.manual_seed(random.randrange(2**31))
    config = AutoConfig.for_model(model_type, **fields)
    model_class = class_for(model_type, fields, random)
    model = model_class(config)
    return live_on(model, fields, random, folder)


def live_on(model: PreTrainedModel, fields: Fields, random: Random, folder: Path) -> str:
    """`live`, once the model is built."""
    config, model_class = model.config, type(model)
    read, learnt = _inputs(model, fields, random)
    _train(model, read, learnt)
    model.eval()
    if model.can_generate():
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": random.random() < 0.5, "pad_token_id": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model.generate(**read, **options)
        begun = 1 if config.is_encoder_decoder else read["input_ids"].shape[1]
        assert out.shape == (2, begun + 3), f"generated {tuple(out.shape)}"
    model.save_pretrained(folder)
    loaded = model_class.from_pretrained(folder).eval()
    _same(model, loaded, read)
    return model_class.__name__


def _inputs(model: PreTrainedModel, fields: Fields, random: Random) -> tuple[dict, dict]:
    """What the model reads, and what it is to learn (nothing where there is no next token)."""
    length = random.randint(1, 9)
    shape = (2, 2, length) if fields.get("paired_input") else (2, length)
    ids = torch.randint(3, fields["vocab_size"], shape)
    mask = torch.ones_like(ids)
    mask[0, ..., : random.randrange(length)] = 0  # left padding, as generation has it
    read, kind, classes = {"input_ids": ids, "attention_mask": mask}, type(model).__name__, fields["num_labels"]
    if "QuestionAnswering" in kind:
        start, end = torch.randint(0, length, (2, 2)).sort(0).values
        return read, {"start_positions": start, "end_positions": end}
    if "TokenClassification" in kind:
        return read, {"labels": torch.randint(0, classes, (2, length)).masked_fill(mask == 0, -100)}
    if "Classification" in kind:
        return read, {"labels": torch.rand(2) if classes == 1 else torch.randint(0, classes, (2,))}
    labels = ids.masked_fill(mask == 0, -100)
    targets = labels if model.config.is_encoder_decoder else labels[:, 1:]
    return read, {"labels": labels} if (targets != -100).any() else {}


def _train(model: PreTrainedModel, read: dict, learnt: dict) -> None:
    model.train()
    if not learnt:
        return
    loss = model(**read, **learnt).loss
    assert torch.isfinite(loss), f"the loss is {loss.item()}"
    loss.backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    assert trained, "no parameter has a gradient"
    assert all(torch.isfinite(p.grad).all() for p in trained), "a gradient is not finite"
    torch.optim.SGD(trained, lr=1e-3).step()


def _same(model: PreTrainedModel, loaded: PreTrainedModel, read: dict) -> None:
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys(), f"keys differ: {sorted(before.keys() ^ after.keys())}"
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), f"{name} differs after loading"
    if model.config.is_encoder_decoder and model.can_generate():
        read = read | {"decoder_input_ids": read["input_ids"]}
    with torch.no_grad():
        left, right = (one(**read, return_dict=False, use_cache=False)[0] for one in (model, in_own_memory(loaded)))
    assert torch.isfinite(left).all(), "a logit is not finite"
    assert torch.equal(left, right), "logits differ after loading"


def refusal(model_type: str, fields: Fields, name: str, random: Random) -> str | None:
    """What is wrong with the answer to a broken field; None if it is refused by name."""
    value = fields[name]
    try:
        class_for(model_type, fields, random)(AutoConfig.for_model(model_type, **fields))
    except (ValueError, StrictDataclassError) as error:
        told = str(error)
        return None if name in told else f"{name}={value!r}: {told}"
    except Exception as error:
        return f"{name}={value!r}: {type(error).__name__}: {error}"
    return f"{name}={value!r} passes silently"


def legal_case(model_type: str, seed: str, folder: Path) -> tuple[str, str | None]:
    """(class, what went wrong or None) of one legal configuration."""
    random = Random(seed)
    fields = legal(model_type, random)
    try:
        return live(model_type, fields, random, folder), None
    except Exception as error:
        return "", f"{type(error).__name__}: {error}, with {fields}"


def crossed_case(model_type: str, seed: str, folder: Path) -> tuple[str, str | None]:
    """("lived" or "refused", what went wrong or None) of one configuration crossed from two legal ones."""
    random = Random(seed)
    fields = crossed(model_type, random)
    torch.manual_seed(random.randrange(2**31))
    try:
        model = class_for(model_type, fields, random)(AutoConfig.for_model(model_type, **fields))
    except (ValueError, StrictDataclassError) as error:
        named = any(name in str(error) for name in fields)
        return "refused", None if named else f"no field is named: {error}, with {fields}"
    except Exception as error:
        return "", f"{type(error).__name__}: {error}, with {fields}"
    try:
        live_on(model, fields, random, folder)
    except Exception as error:
        return "", f"built, then {type(error).__name__}: {error}, with {fields}"
    return "lived", None


def broken_case(model_type: str, seed: str) -> tuple[str, str | None]:
    """(field, what went wrong or None) of one broken configuration."""
    random = Random(seed)
    fields, name = broken(model_type, random)
    return name, refusal(model_type, fields, name, random)
