"""transformers' own tensor and pipeline parallelism, with the plans of our configurations: two processes equal one."""

from pathlib import Path

import pytest
import torch

from tests.distributed.launching import in_two_processes
from tests.distributed.tensor_parallel_worker import answers, text
from tests.small_models import built

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
TENSOR = ["longhorn", "longhorn hybrid", "spade", "bst mh", "bst mf", "lmu_isa", "lmu_isa global", "spade_seq2seq"]
PIPELINE = ["longhorn", "longhorn hybrid", "bst sh", "lmu_isa"]
RANKS = (0, 1)


def found_by_two(folder, kind, cases):
    for case in cases:
        built(case, use_cache=True).save_pretrained(folder / "models" / case)
    in_two_processes(WORKER, folder / "models", kind)
    return [torch.load(folder / f"{kind}-{rank}.pt") for rank in RANKS]


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory):
    return found_by_two(tmp_path_factory.mktemp("tensor"), "tensor", TENSOR)


@pytest.fixture(scope="module")
def pipeline_parallel(tmp_path_factory):
    return found_by_two(tmp_path_factory.mktemp("pipeline"), "pipeline", PIPELINE)


@pytest.mark.parametrize("case", TENSOR)
def test_tensor_parallel(tensor_parallel, case):
    expected = answers(built(case))
    for rank in RANKS:
        found, (held, all_numbers) = tensor_parallel[rank][case]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=f"{case} {name}")
        assert held < 0.8 * all_numbers  # a model this small is mostly what stays whole; weights of products halve


@pytest.mark.parametrize("case", PIPELINE)
def test_pipeline_parallel(pipeline_parallel, case):
    """Logits, and text generated from a padded batch."""
    expected = text(built(case, use_cache=True))
    for rank in RANKS:
        found, _ = pipeline_parallel[rank][case]
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        assert torch.equal(found["text"], expected["text"])
    shares = [pipeline_parallel[rank][case][1][0] for rank in RANKS]
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
