"""Batch normalisation over tokens: statistics of the real ones, taken in once."""

import pytest
import torch
from transformers import AutoConfig

import hf_hybrid_ssm
from hf_hybrid_ssm.models.spade.options_spade import TimeBatchNorm
from tests.tiny_models import SEQ2SEQ, SPADE, TOKENS, classes_of, inputs_for

CLASSES = [*classes_of("spade batchnorm"), *classes_of("encoder-decoder")]


def model_of(name: str, **fields):
    cls = getattr(hf_hybrid_ssm, name)
    kind = cls.config_class.model_type
    own = {**(SEQ2SEQ if kind == "spade_seq2seq" else SPADE), "norm_type": "batchnorm"}
    dropouts = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout", "activation_dropout"), 0.0)
    torch.manual_seed(0)
    return cls(AutoConfig.for_model(kind, **{**TOKENS, **own, **dropouts, **fields})).double().train()


def step(model, inputs):
    """Output, gradients and running statistics of a training step."""
    kept = {name: value for name, value in inputs.items() if "labels" not in name}
    output = model(**kept)[0]
    if "attention_mask" in inputs and output.shape[:2] == inputs["attention_mask"].shape:
        output = output[inputs["attention_mask"].bool()]
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(-1)
    (output.flatten() * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.flatten(), gradients, dict(model.named_buffers())


def assert_same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert one.keys() == other.keys() and one
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], msg=lambda text, name=name: f"{name}: {text}")


def test_real_tokens_are_a_batch_of_their_own():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 5, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.rand(3, 7, generator=generator) < 0.6
    norm, plain = TimeBatchNorm(5).double(), torch.nn.BatchNorm1d(5).double()
    for step in range(3):
        y, wanted = norm(x * (step + 1), mask)[mask], plain(x[mask] * (step + 1))
        torch.testing.assert_close(y, wanted)
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        (found,), (expected,) = (torch.autograd.grad((v * weights).sum(), x) for v in (y, wanted))
        torch.testing.assert_close(found, expected)
        for name, value in plain.named_buffers():
            torch.testing.assert_close(norm.get_buffer(name), value)
    torch.testing.assert_close(norm.eval()(x, mask)[mask], plain.eval()(x[mask]))
    norm.train()(x, torch.zeros(3, 7, dtype=torch.bool))  # nothing to take in
    assert all(value.isfinite().all() for value in norm.buffers())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("position", "side"), [("pre", "left"), ("post", "right")])
def test_padding_changes_nothing(name, position, side):
    plain, padded = (model_of(name, norm_position=position) for _ in range(2))
    inputs = inputs_for(plain, length=9)
    pad = {"left": (3, 0), "right": (0, 3)}[side]
    ids = torch.nn.functional.pad(inputs["input_ids"], pad, value=TOKENS["pad_token_id"])
    given = {**inputs, "input_ids": ids, "attention_mask": (ids != TOKENS["pad_token_id"]).long()}
    whole = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    assert_same(step(padded, given), step(plain, whole))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_takes_each_batch_in_once(name, reentrant):
    plain, saving = (model_of(name) for _ in range(2))
    saving.gradient_checkpointing_enable({"use_reentrant": reentrant})
    inputs = inputs_for(plain, length=9)
    ids = torch.nn.functional.pad(inputs["input_ids"], (0, 2), value=TOKENS["pad_token_id"])
    for given in (inputs, {**inputs, "input_ids": ids, "attention_mask": (ids != TOKENS["pad_token_id"]).long()}):
        runs = []
        for model in (saving, plain):
            model.zero_grad()
            if reentrant:  # it needs an input with a gradient
                model.enable_input_require_grads()
            runs.append(step(model, given))
        assert_same(*runs)
    counts = [value for name, value in saving.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts and all(int(count) == 2 for count in counts)
