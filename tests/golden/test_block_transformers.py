"""Sliding-window and Block-Recurrent layers against meliad, the official code of Block-Recurrent Transformers."""

import pytest
import torch

from hf_hybrid_ssm.layers.relative_bias import distance_buckets
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.modeling_bst import BstBlock
from hf_hybrid_ssm.models.cache import prepare_cache
from hf_hybrid_ssm.models.packing import resolve_packing
from tests.golden.values import Tensors, assert_near, golden, load

# names of dense layers and of vectors; those of the state in "recurrent" layers
MATRICES = {
    "tbase._kvq.queries_layer": "attention.q_proj",
    "tbase._kvq.keys_layer": "attention.k_proj",
    "tbase._kvq.values_layer": "attention.v_proj",
    "tbase._kvq.queries2_layer": "attention.context_q_proj",
    "tbase.post_attn_mlp.output_layer": "attention.o_proj",
    "tbase.ffn.hidden0": "feed_forward.fc1",
    "tbase.ffn.output_layer": "feed_forward.fc2",
    "recurrent_tbase._kvq.queries_layer": "attention.recurrent.q_proj",
    "recurrent_tbase._kvq.queries2_layer": "attention.recurrent.token_q_proj",
    "recurrent_tbase._kvq.keys_layer": "attention.recurrent.k_proj",
    "recurrent_tbase._kvq.values_layer": "attention.recurrent.v_proj",
    "recurrent_tbase.post_attn_mlp.output_layer": "attention.recurrent.o_proj",
}
VECTORS = {
    "tbase._kvq.pre_attn_layernorm.scale": "attention_norm.weight",
    "tbase._kvq.attention_scale": "attention.scale",
    "tbase.attention_scale2": "attention.context_scale",
    "tbase.pre_ffn_layernorm.scale": "feed_forward_norm.weight",
    "recurrent_initial_state": "attention.recurrent.initial_state",
    "recurrent_tbase._kvq.position_embeddings": "attention.recurrent.state_ids",
    "recurrent_tbase._kvq.pre_attn_layernorm.scale": "attention.recurrent.norm.weight",
    "recurrent_tbase._kvq.attention_scale": "attention.recurrent.scale",
    "recurrent_tbase.attention_scale2": "attention.recurrent.token_scale",
    "recurrent_tbase.post_attn_mlp.gate_bias": "attention.recurrent.gate",
}
WINDOWS = {"sliding": 24, "recurrent": 4, "plain": 4}  # "plain" is recurrent, without normalised queries and keys


def converted(official: Tensors) -> Tensors:
    """Dense kernels are (in, out) there, the table of the bias (heads, buckets)."""
    found = {}
    for name, tensor in official.items():
        if name in VECTORS:
            found[VECTORS[name]] = tensor
        elif name == "relative_positions.rel_embedding":
            found["attention.relative_bias.weight"] = tensor.T.contiguous()
        else:
            found[f"{MATRICES[name.removesuffix('.kernel')]}.weight"] = tensor.T.contiguous()
    return found


def build(case: str) -> tuple[BstBlock, BstConfig]:
    kind = "window_attention" if case == "sliding" else "block_recurrent"
    sizes = {"hidden_size": 6, "num_attention_heads": 2, "head_dim": 3, "intermediate_size": 10, "vocab_size": 11}
    sizes |= {"num_hidden_layers": 1, "sliding_window": WINDOWS[case], "recurrent_num_states": 3}
    config = BstConfig(layer_types=[kind], qk_norm=case != "plain", **sizes)
    config._attn_implementation = "sdpa"
    block = BstBlock(config, 0).double().eval()
    load(block, converted(golden("meliad", f"{case}.param")))
    return block, config


@pytest.mark.parametrize("case", WINDOWS)
def test_layer(case):
    """Two segments: the first row goes on in the second one, the second row begins another document there."""
    block, _ = build(case)
    wanted = golden("meliad", case)
    with torch.no_grad():
        whole = block(torch.cat([wanted["x1"], wanted["x2"]], 1))
        fresh = block(wanted["x2"])
    first, second = whole.split(wanted["x1"].shape[1], dim=1)
    assert_near(first, wanted["y1"])
    assert_near(second[0], wanted["y2"][0])
    assert_near(fresh[1], wanted["y2"][1])


@pytest.mark.parametrize("case", WINDOWS)
def test_layer_on_packed_rows(case):
    block, _ = build(case)
    wanted = golden("meliad", case)
    length = wanted["x1"].shape[1]
    seq_idx = torch.zeros(2, 2 * length, dtype=torch.int32)
    seq_idx[1, length:] = 1
    with torch.no_grad():
        rows = resolve_packing((2, 2 * length), (0, {}), seq_idx=seq_idx)
        y = block(torch.cat([wanted["x1"], wanted["x2"]], 1), rows)
    assert_near(y, torch.cat([wanted["y1"], wanted["y2"]], 1))


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("pieces", [[12, 12], [5, 1, 6, 12], [1] * 24])
def test_layer_with_a_cache(case, pieces):
    """The first row in pieces; the official state at the end of each segment, of both rows."""
    block, config = build(case)
    wanted = golden("meliad", case)
    length = wanted["x1"].shape[1]
    x = torch.cat([wanted["x1"], wanted["x2"]], 1)
    pieces = [part * length // 12 for part in pieces]
    cache, parts = prepare_cache(None, config, 2), []
    with torch.no_grad():
        for piece in x.split(pieces, dim=1):
            parts.append(block(piece, cache=cache))
            seen = sum(part.shape[1] for part in parts)
            states = cache.layers[0].states
            if case != "sliding" and seen in (length, 2 * length):
                rows, name = (slice(2), "state1") if seen == length else (slice(1), "state2")
                assert_near(states["recurrent"][rows], wanted[name][rows])
            elif case == "sliding" and seen == length:
                assert_near(states["keys"].transpose(1, 2), wanted["keys1"])
                assert_near(states["values"].transpose(1, 2), wanted["values1"])
    first, second = torch.cat(parts, 1).split(length, dim=1)
    assert_near(first, wanted["y1"])
    assert_near(second[0], wanted["y2"][0])


@pytest.mark.parametrize("case", ["sliding", "recurrent"])
def test_gradients(case):
    """Of every parameter, through all updates of the recurrent state."""
    block, _ = build(case)
    wanted = golden("meliad", case)
    x = wanted["x1"].requires_grad_()
    (block(x) * wanted["weight"]).sum().backward()
    assert_near(x.grad, wanted["grad_x1"])
    gradients = converted(golden("meliad", f"{case}.grad"))
    parameters = dict(block.named_parameters())
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        assert_near(parameters[name].grad, gradient)


@pytest.mark.parametrize("source", ["meliad", "spade_layer"])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 64), (32, 500)])
def test_distance_buckets(source, buckets, distance):
    wanted = golden(source)[f"buckets.{buckets}_{distance}"].tolist()
    assert list(distance_buckets(buckets, distance, len(wanted))) == wanted


@pytest.mark.parametrize("source", ["meliad", "spade_layer"])
def test_two_sided_buckets(source):
    """From 300 tokens back to 300 tokens ahead, which use the later half of the table."""
    wanted = golden(source)["buckets.two_sided_32_128"].tolist()
    back = distance_buckets(16, 128, 301)
    assert [*reversed(back), *(16 + bucket for bucket in back[1:])] == wanted
