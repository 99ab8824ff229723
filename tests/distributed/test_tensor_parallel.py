"""transformers' own tensor and pipeline parallelism, with the plans of our configurations: two processes equal one."""

import pytest
import torch

from tests.distributed.tensor_parallel import PIPELINE, TENSOR, answers, text, training_loss
from tests.small_models import built

RANKS = (0, 1)


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
    """Logits, and text generated from a padded batch."""
    expected = text(built(case, use_cache=True))
    for rank in RANKS:
        values, _ = found[rank]["pipeline", case]
        torch.testing.assert_close(values["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        assert torch.equal(values["text"], expected["text"])
    shares = [found[rank]["pipeline", case][1][0] for rank in RANKS]
    assert max(shares) < sum(p.numel() for p in built(case).parameters())


@pytest.mark.parametrize("case", TENSOR)
def test_every_rule_names_a_linear_map(case):
    """A plan must not shard what cannot be: a rule that matches, matches a linear map or an embedding."""
    model = built(case)
    names = {name for name, _ in model.named_modules()}
    matched = 0
    for rule, style in model.tp_plan.items():
        for name in names:
            if [part if not part.isdigit() else "*" for part in name.split(".")] == rule.split("."):
                matched += 1
                kind = torch.nn.Embedding if style.startswith("embedding") else torch.nn.Linear
                assert isinstance(model.get_submodule(name), kind), f"{rule} names {name}"
    assert matched >= 10
