"""What students have beside their teachers' attention, by its equations."""

import copy
import math

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_hybrid_ssm.students.initial import student_of
from hf_hybrid_ssm.training.optim import parameter_groups
from tests.students.teachers import WINDOW, masked, student, teacher, tokens


@torch.no_grad()
def test_queries_that_see_all_tokens_grow_with_their_position():
    """By 1 + a log(1 + ⌊(p + 1) / f⌋), in kept layers and in kept groups, and no others."""
    scale, floor, kept = 0.3, 4, {(0, 1), (2, 0), (2, 1)}
    model = student_of(
        teacher("llama"), keep=[(0, 1), 2], window=WINDOW, sink=None, attn_scale=scale, floor_scale=floor
    )
    ids = tokens(2, 21)

    def attend(module, query, key, value, mask, **options):
        factors = torch.tensor([1 + scale * math.log(1 + (p + 1) // floor) for p in range(query.shape[2])]).double()
        sees_all = torch.tensor([(module.layer_idx, head // 2) in kept for head in range(4)])
        query = query * torch.where(sees_all[:, None], factors, 1.0)[..., None]
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("multiplied_by_hand", attend)
    AttentionMaskInterface.register("multiplied_by_hand", sdpa_mask)
    own, before = teacher("llama"), teacher("llama").config._attn_implementation
    own.set_attn_implementation("multiplied_by_hand")
    try:
        wanted = masked("llama", ids, groups_that_see_all={(0, 1)}, layers=[2])
    finally:
        own.set_attn_implementation(before)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-6)  # of factors in float32
    plain = student_of(own, keep=[(0, 1), 2], window=WINDOW, sink=None)(ids).logits
    assert (plain - wanted)[:, floor:].abs().amax(-1).min() > 1e-4
    assert (plain - wanted)[:, : floor - 1].abs().max() < 1e-6


def test_sinks_are_not_decayed():
    model = copy.deepcopy(student("qwen3", "constant")).requires_grad_(True)
    groups = parameter_groups(model, weight_decay=0.1)
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    sinks = [parameter for name, parameter in model.named_parameters() if ".sink." in name]
    assert sinks and {decay[id(parameter)] for parameter in sinks} == {0.0}
    assert 0.1 in decay.values()
