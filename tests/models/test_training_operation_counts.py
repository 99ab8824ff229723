"""Operations that a training step dispatches, forward and backward: no change may raise them unseen.

Counts are those of `tests/counting.py`: views and allocations are free, a kernel of this package counts once. They are
taken at two lengths: a count that grows with the length is a loop over it. (On a CPU the FFT of a long convolution
goes by groups of channels that fit into the cache; these layers are too narrow for a second one.)
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_hybrid_ssm.layers.mixers.registry import build_mixer
from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.ops.core.rows import Rows
from tests.counting import count_operations
from tests.tiny_models import TOKENS, VARIANTS

pytestmark = pytest.mark.skipif(missing_compiler() is not None, reason="the counts are those of the C kernels")

# of a mixer alone: the most operations of whole rows, and of packed ones
MIXERS = {
    "s4d": (58, 65),
    "s5": (73, 80),
    "ema": (43, 50),
    "hyena": (157, 219),
    "unstructured": (102, 147),
}
S4 = {False: (303, 348), True: (29, 80)}  # frozen or not, at 2,048 tokens; powers of the dense matrix come by doubling
# of a model's layer: the variant, its fields, the most operations
SSM = {"ssm_state_size": 8}
TRAINING = {
    "spade s5": ("spade s4 window", {**SSM, "ssm_layers": [0], "ssm_type": "s5", "ssm_trainable": "all"}, 167),
    "spade frozen s4": ("spade s4 window", {"ssm_layers": [0]}, 129),
    "spade hyena": ("spade s4 window", {"ssm_layers": [0], "ssm_type": "hyena", "filter_length": 2048}, 244),
    "bst sh s4d": ("bst sh s4d", {}, 260),
    "bst sh s5": ("bst sh s4d", {**SSM, "ssm_type": "s5"}, 276),
    "lmu-isa": ("lmu-isa", {}, 37),
}
SIZES = {"hidden_size": 16, "num_attention_heads": 2}  # none changes how many operations there are
BST = SIZES | {"head_dim": 8, "intermediate_size": 24, "num_context_states": 8, "ssm_layers": None}
WINDOW = {"sliding_window": 128, "layer_types": ["window_attention"]}
SPADE = SIZES | {"intermediate_size": 24, "ssm_layers": []}
WINDOWS = {
    "BST window": ("bst", BST | WINDOW, 155),
    "SPADE window": ("spade", SPADE | {"sliding_window": 128}, 105),
    "SPADE chunk": ("spade", SPADE | {"attention_type": "chunk", "chunk_size": 128}, 95),
    "Longhorn window": ("longhorn", SIZES | WINDOW | {"num_key_value_heads": 2, "mlp_intermediate_size": 24}, 132),
}


def of_a_mixer(name: str, length: int, packed: bool, **options) -> int:
    mixer = build_mixer(name, 8, **options)
    u = torch.randn(2, length, 8, requires_grad=True)
    seq_idx = (torch.arange(length) // (length // 2)).expand(2, -1) if packed else None
    rows = Rows.of(seq_idx=seq_idx)

    def step() -> None:
        mixer(u, rows=rows)[0].sum().backward()

    step()  # what is made once for frozen parameters
    return count_operations(step).total()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_mixers(name, packed):
    options = {"filter_length": 2048} if name in ("hyena", "unstructured") else {}
    short, long = (of_a_mixer(name, length, packed, **options) for length in (64, 2048))
    assert short == long <= MIXERS[name][packed]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_s4(frozen, packed):
    assert of_a_mixer("s4", 2048, packed, trainable="none" if frozen else "all") <= S4[frozen][packed]


def of_a_layer(model_type: str, fields: dict, length: int) -> float:
    """What a layer adds to a forward and backward pass."""

    def of_a_model(depth: int) -> int:
        layers: dict = {"num_hidden_layers": depth}
        if fields.get("ssm_layers"):
            layers["ssm_layers"] = list(range(depth))
        if "layer_types" in fields:
            layers["layer_types"] = fields["layer_types"] * depth
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **TOKENS | fields | layers))
        ids = torch.ones(2, length, dtype=torch.long)

        def step() -> None:
            model.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()

        step()  # tables are made once
        return count_operations(step).total()

    return (of_a_model(4) - of_a_model(2)) / 2


@pytest.mark.parametrize("layer", TRAINING)
def test_layers(layer):
    variant, fields, most = TRAINING[layer]
    model_type, own = VARIANTS[variant]
    short, long = (of_a_layer(model_type, own | fields, length) for length in (66, 264))
    assert short == long <= most


@pytest.mark.parametrize("name", WINDOWS)
def test_window_layers(name):
    model_type, fields, most = WINDOWS[name]
    wide = fields | ({"chunk_size": 512} if "chunk" in name else {"sliding_window": 512})
    counts = [of_a_layer(model_type, fields, 512), of_a_layer(model_type, fields, 2048)]
    assert counts[0] == counts[1] <= most and of_a_layer(model_type, wide, 2048) <= most


def test_recurrent_states_cost_the_same_few_operations_a_block():
    """The recurrence over blocks is one in the paper too."""
    fields = BST | {"sliding_window": 64, "recurrent_num_states": 8, "layer_types": ["block_recurrent"]}
    short, long = (of_a_layer("bst", fields, length) for length in (256, 512))
    assert (long - short) / 4 <= 66 and short <= 66 * 4 + 280


def test_filters_of_context_states_are_read_at_the_ends_of_blocks_only():
    """The context of many filters does not cost more for a longer row."""
    fields = BST | {"sliding_window": 128, "context_variant": "mf", "ssm_type": "unstructured", "filter_length": 64}
    counts = [of_a_layer("bst", fields | {"layer_types": ["bst"]}, length) for length in (512, 2048)]
    assert counts[0] == counts[1] <= 350
