"""Every parameter starts as its class says, but for the mixers', which tests/layers compares with their papers."""

import re

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_models import classes_of, config_of

STD = 0.05
SIZES = {"hidden_size": 64, "initializer_range": STD, "tie_word_embeddings": False}
NORMAL_MAPS = [(r"(_proj|fc\d|lm_head|aggregate|dense|classifier|embed_\w+|positions?)\.weight", "normal", STD)]
NORMS = [
    (r"\.sink\.", "zeros", None),
    (r"norm\w*\.weight|\bscale$|_scale$|\bD$", "ones", None),
    (r"bias$", "zeros", None),
]
# by a pattern of names, the first that fits: the distribution, and its standard deviation (or half width) by the shape
RULES: dict[str, list] = {
    "longhorn": [
        (r"embed_tokens|lm_head", "normal", STD),
        (r"(mixer\.out|self_attn\.o|mlp\.down)_proj", "uniform", lambda shape: (3 * shape[1]) ** -0.5),  # three layers
        (r"_proj\.weight", "uniform", lambda shape: shape[1] ** -0.5),
        (r"conv1d", "uniform", lambda shape: 0.5),  # a kernel of 4
        *NORMS,
    ],
    "bst": [
        (r"embed_tokens", "normal", STD),
        (r"relative_bias", "normal", lambda shape: shape[0] ** -0.5),
        (r"initial_(context|state)|\bgate$", "normal", 0.1),
        (r"(context|state)_ids", "normal", 1.0),
        (r"(_proj|fc\d|lm_head)\.weight", "truncated", lambda shape: shape[1] ** -0.5),
        *NORMS,
    ],
    "lmu_isa": [
        (r"reduce_weight", "normal", lambda shape: shape[-1] ** -0.5),
        (r"collapse_weight", "normal", lambda shape: shape[0] ** -0.5),
        *NORMAL_MAPS,
        *NORMS,
    ],
    "spade": [
        (r"relative_bias", "zeros", None),
        (r"table_\d", "normal", lambda shape: shape[1] ** -0.5),
        (r"projection_\d", "uniform", lambda shape: (6 / sum(shape)) ** 0.5),
        (r"clusters", "normal", STD),
        *NORMAL_MAPS,
        *NORMS,
    ],
}
RULES["spade_seq2seq"] = RULES["spade"]
HYBRID = {"mlp_intermediate_size": 40}
MEMORY = {"lmu_order": 64, "lmu_reduced_order": 32, "lmu_theta": 80.0}
MODELS = [
    ("longhorn + window and full attention", "LonghornForCausalLM", HYBRID),
    ("bst mf unstructured", "BstForCausalLM", {}),
    ("bst mh s4", "BstForCausalLM", {}),
    ("bst block-recurrent", "BstForCausalLM", {}),
    ("bst with memory", "BstForCausalLM", {}),
    ("lmu-isa", "LmuIsaForCausalLM", MEMORY),
    ("lmu-isa + window attention", "LmuIsaForCausalLM", MEMORY),
    ("spade s4 window", "SpadeForSequenceClassification", {}),
    ("spade adaptive", "SpadeForMaskedLM", {"tie_word_embeddings": True}),
    ("encoder-decoder", "SpadeForConditionalGeneration", {}),
]


def check(values: torch.Tensor, kind: str, size: float) -> None:
    count, largest = values.numel(), float(values.abs().max())
    if kind in ("zeros", "ones"):
        assert bool((values == (kind == "ones")).all())
        return
    deviation = size / 3**0.5 if kind == "uniform" else size
    assert float(values.square().mean().sqrt()) == pytest.approx(deviation, rel=4 / count**0.5)
    assert abs(float(values.mean())) < 5 * deviation / count**0.5
    if kind == "uniform":
        assert largest <= size
    elif count > 500:
        assert (largest > 2.4 * size) == (kind == "normal")  # two deviations of what was cut are 2.27 of the rest


@pytest.mark.parametrize(("variant", "class_name", "fields"), MODELS)
def test_initial_values(variant, class_name, fields):
    torch.manual_seed(0)
    model: PreTrainedModel = classes_of(variant)[class_name](config_of(variant, **SIZES | fields))
    for name, parameter in model.named_parameters():
        if re.search(r"\.ssm\.", name):
            continue
        rules = [rule for rule in RULES[model.config.model_type] if re.search(rule[0], name)]
        assert rules, f"no rule for {name}"
        _, kind, size = rules[0]
        try:
            check(parameter.detach().double(), kind, size(parameter.shape) if callable(size) else size)
        except AssertionError as error:
            raise AssertionError(f"{name} {tuple(parameter.shape)} is not {kind}: {error}") from None
