"""transformers' own tensor and pipeline parallelism, with the plans of our configurations: two processes equal one."""

import re
from collections import defaultdict

import pytest
import torch

from tests.distributed.tensor_parallel import PIPELINE, TENSOR, answers, inputs, text, training_loss
from tests.tiny_models import CASES, built

RANKS = (0, 1)
NEVER_IN_SMALL_MODELS = {"decoder.layers.*.mixing.aggregate"}  # an encoder-decoder's with decoder_ssm_layers
# a student's heads are gathered: its teacher's norms need no sum of gradients
NEVER_IN_SMALL_MODELS |= {"layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"}


@pytest.fixture(scope="module")
def found(two_processes):
    return [torch.load(two_processes / f"parallel-{rank}.pt") for rank in RANKS]


@pytest.mark.parametrize("case", TENSOR)
def test_tensor_parallel(found, case):
    expected = answers(built(case))
    for rank in RANKS:
        values, (held, all_numbers) = found[rank]["tensor", case]
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-5, msg=f"{case} {name}")
        assert held < 0.8 * all_numbers  # a model this small is mostly what stays whole; weights of products halve


@pytest.mark.parametrize("case", TENSOR)
def test_text_of_a_tensor_parallel_model(found, case):
    """From a padded batch, with each process's share of keys and values in its own cache."""
    expected = text(built(case, use_cache=True))["text"]
    assert all(torch.equal(found[rank]["text", case]["text"], expected) for rank in RANKS)


def test_chunked_loss_of_a_split_head(found):
    expected = training_loss(built("longhorn"))
    for rank in RANKS:
        torch.testing.assert_close(found[rank]["loss"], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", PIPELINE)
def test_pipeline_parallel(found, case):
    """Logits, and text generated from a padded batch; of students without those of padding, which they leave out."""
    model = built(case, use_cache=True)
    expected, is_real = text(model), inputs(model)["attention_mask"].bool()
    shown = is_real if case.startswith("student") else torch.ones_like(is_real)
    for rank in RANKS:
        values, _ = found[rank]["pipeline", case]
        torch.testing.assert_close(values["logits"][shown], expected["logits"][shown], rtol=1e-5, atol=1e-5)
        assert torch.equal(values["text"], expected["text"])
    shares = [found[rank]["pipeline", case][1][0] for rank in RANKS]
    assert max(shares) < sum(p.numel() for p in built(case).parameters())


def test_rules_name_what_there_is():
    """Every rule of a model names a linear map or an embedding of it, and none of a configuration is for nothing."""
    used = defaultdict(set)
    plans = {}
    for case in CASES:
        model = built(case)
        names = {re.sub(r"\.\d+\.", ".*.", name): module for name, module in model.named_modules()}
        assert len(model.tp_plan) >= 4
        for rule, style in model.tp_plan.items():
            kind = torch.nn.Embedding if style.startswith("embedding") else torch.nn.Linear
            assert isinstance(names[rule], kind), f"{case}: {rule}"
            used[model.config.model_type].add(rule.removeprefix("model."))
        plans[model.config.model_type] = model.config.base_model_tp_plan
    assert len(plans) == 6
    for model_type, plan in plans.items():
        never = plan.keys() - used[model_type] - NEVER_IN_SMALL_MODELS
        assert not never, f"{model_type}: {never}"


def test_an_adaptive_softmax_stays_whole():
    model = built("spade", vocab_size=60, hidden_size=32, adaptive_cutoffs=[20, 40])
    assert "lm_head" not in model.tp_plan and "model.layers.*.feed_forward.fc1" in model.tp_plan
