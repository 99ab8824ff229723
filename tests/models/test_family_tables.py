"""Every family's table of published sizes, and of configurations that contradict themselves."""

import pytest
import torch

import hf_hybrid_ssm
from tests import tiny_models as tiny

COUNTS: dict[str, list[tuple]] = {
    "LonghornForCausalLM": [
        ("125m", {}, 128_563_968),
        ("350m", {}, 369_968_128),
        ("1.3b", {}, 1_331_595_264),
        ("1.3b", {"vocab_size": 50304}, 1_369_081_856),
    ],
    "BstForCausalLM": [
        ("200m-slide", {}, 183_922_784),
        ("200m-block-recurrent", {}, 193_362_040),
        ("80m", {}, 98_334_328),
        ("80m", {"context_variant": "mh"}, 98_871_928),
        ("80m", {"context_variant": "mf"}, 100_813_432),
        ("80m", {"ssm_layers": []}, 91_962_976),
        ("80m", {"context_variant": "mf", "ssm_type": "unstructured"}, 101_582_392),
        ("200m", {}, 196_665_464),
        ("200m", {"context_variant": "mf"}, 201_623_672),
        ("200m", {"ssm_type": "s4"}, 196_714_616),
        ("200m", {"ssm_num_dynamics": 1}, 196_567_256),
        ("400m", {}, 368_688_384),
        ("400m", {"context_variant": "mf", "ssm_type": "s4"}, 377_396_480),
        ("1.3b", {}, 1_374_804_448),
        ("1.3b", {"context_variant": "mh"}, 1_384_327_648),
    ],
    "SpadeForCausalLM": [
        ("spade-lm-wt103", {}, 249_234_688),
    ],
    "SpadeForConditionalGeneration": [
        ("spade-base", {}, 225_264_384),
        ("spade-base", {"tie_word_embeddings": False}, 249_938_688),
        ("spade-base++", {"vocab_size": 50265}, 239_193_600),
    ],
}
BAD: dict[str, list[tuple]] = {
    "Longhorn": [
        ({"layer_types": ["longhorn"]}, "names 1 layers"),
        ({"layer_types": ["mamba"] * 3}, "mamba"),
        ({"layer_types": ["window_attention"] * 3, "sliding_window": None}, "sliding_window=None"),
    ],
    "Bst": [
        ({"ssm_layers": [3]}, r"ssm_layers=\[3\] must name different layers from 0 to 2"),
        ({"ssm_layers": [1, 1]}, "different layers"),
        ({"ssm_layers": None, "layer_types": ["window_attention"]}, "num_hidden_layers=3"),
        ({"ssm_layers": None, "layer_types": ["window_attention", "bst", "lstm"]}, "lstm"),
        ({"layer_types": ["window_attention"] * 3}, "contradicts layer_types"),
        ({"ssm_type": "s4", "ssm_discretization": "zoh"}, "does not exist for ssm_type='s4'"),
        ({"ssm_type": "s5", "ssm_discretization": "bilinear"}, "does not exist for ssm_type='s5', which has 'zoh'"),
        ({"ssm_type": "unstructured", "ssm_discretization": "zoh"}, "no continuous system"),
        ({"ssm_state_size": 5}, "must be even"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"retrieval_k": 9, "retrieval_memory": 4}, "cannot exceed the retrieval_memory=4"),
        ({"retrieval_memory": 4}, "do nothing without retrieval_k"),
        ({"retrieval_k": 2, "retrieval_stride": 7}, "retrieval_stride=7 would keep none"),
        ({"retrieval_k": 2, "ssm_layers": []}, "needs 'bst' layers"),
        ({"bidirectional": True, "context_variant": "mf"}, "bidirectional=True has no meaning"),
        ({"bidirectional": True, "relative_attention_num_buckets": 6}, "multiple of 4"),
    ],
    "LmuIsa": [
        ({"lmu_reduced_order": 11}, "lmu_reduced_order=11 must be at most lmu_order=10"),
        ({"first_sublayer": "global_attention", "num_attention_heads": 5}, "num_attention_heads=5"),
        ({"first_sublayer": "window_attention", "sliding_window": None}, "sliding_window=None"),
    ],
    "Spade": [
        ({"ssm_layers": [0, 0]}, "distinct"),
        ({"num_attention_heads": 5}, "multiple of num_attention_heads=5"),
        ({"relative_attention_num_buckets": 6}, "multiple of 4"),
        ({"ssm_type": "lstm", "ssm_trainable": "output"}, "'output' is not one of 'all', 'none'.*'lstm'"),
        ({"adaptive_cutoffs": [40, 20]}, "adaptive_cutoffs"),
        ({"adaptive_cutoffs": [20], "tie_word_embeddings": False}, "tie_word_embeddings"),
    ],
}
SIZES = {"Longhorn": tiny.LONGHORN, "Bst": tiny.BST, "LmuIsa": tiny.LMU, "Spade": tiny.SPADE}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in COUNTS.items() for row in rows], ids=str)
def test_parameter_counts(name, row):
    (preset, fields, count), model_class = row, getattr(hf_hybrid_ssm, name)
    with torch.device("meta"):
        model = model_class(model_class.config_class.preset(preset, **fields))
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("family", "row"), [(family, row) for family, rows in BAD.items() for row in rows], ids=str)
def test_bad_configurations(family, row):
    fields, message = row
    with pytest.raises(ValueError, match=message):
        getattr(hf_hybrid_ssm, f"{family}Config")(**tiny.TOKENS | SIZES[family] | fields)
