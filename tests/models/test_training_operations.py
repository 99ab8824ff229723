"""How many operations a layer adds to a training step, however long the row is."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_hybrid_ssm  # noqa: F401 - registers the families
from tests.counting import count_operations

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 61}  # none changes how many operations there are
BST = SIZES | {"head_dim": 8, "intermediate_size": 24, "num_context_states": 8, "ssm_layers": None}
SPADE = SIZES | {"intermediate_size": 24, "ssm_layers": []}
LAYERS = {
    "BST window": ("bst", BST | {"sliding_window": 128}, "window_attention", 155),
    "SPADE window": ("spade", SPADE | {"sliding_window": 128}, None, 105),
    "SPADE chunk": ("spade", SPADE | {"attention_type": "chunk", "chunk_size": 128}, None, 95),
    "Longhorn window": (
        "longhorn",
        SIZES | {"sliding_window": 128, "num_key_value_heads": 2, "mlp_intermediate_size": 24},
        "window_attention",
        132,
    ),
}


def operations_of_a_layer(model_type: str, fields: dict, block_type: str | None, length: int) -> int:
    """What the second layer adds to a forward and backward pass."""
    totals = []
    for depth in (1, 2):
        kinds = {} if block_type is None else {"layer_types": [block_type] * depth}
        config = AutoConfig.for_model(model_type, **fields, **kinds, num_hidden_layers=depth)
        model, ids = AutoModelForCausalLM.from_config(config).train(), torch.ones(2, length, dtype=torch.long)
        model(ids, labels=ids).loss.backward()  # tables are made once
        model.zero_grad()
        totals.append(count_operations(lambda: model(ids, labels=ids).loss.backward()).total())  # noqa: B023
    return totals[1] - totals[0]


@pytest.mark.parametrize("name", LAYERS)
def test_window_layers(name):
    *layer, most = LAYERS[name]
    short, long = (operations_of_a_layer(*layer, length) for length in (512, 2048))
    assert short == long <= most
    wide = layer[1] | ({"chunk_size": 512} if "chunk" in name else {"sliding_window": 512})
    assert operations_of_a_layer(layer[0], wide, layer[2], 2048) <= most


def test_recurrent_states_cost_the_same_few_operations_a_block():
    """The recurrence over blocks is one in the paper too."""
    layer = "bst", BST | {"sliding_window": 64, "recurrent_num_states": 8}, "block_recurrent"
    short, long = (operations_of_a_layer(*layer, length) for length in (256, 512))
    assert (long - short) / 4 <= 66 and short <= 66 * 4 + 280


def test_filters_of_context_states_are_read_at_the_ends_of_blocks_only():
    """The context of many filters does not cost more for a longer row."""
    fields = BST | {"sliding_window": 128, "context_variant": "mf", "ssm_type": "unstructured", "filter_length": 64}
    counts = [operations_of_a_layer("bst", fields, "bst", length) for length in (512, 2048)]
    assert counts[0] == counts[1] <= 350
