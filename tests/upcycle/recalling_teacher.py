"""A Llama made by hand that recalls: after a token that it has read before, it says what came next then.

Its third layer alone has a use for what lies far back. The second reads one token back,
the first and last add nothing.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 64
LAYERS, READS_PREVIOUS, RECALLS = 4, 1, 2
HALF = 64
"""Pairs of rotated channels in a head: the second half of them turns by less than 1e-4 a token."""
FIELDS = {"vocab_size": VOCAB, "hidden_size": 3 * VOCAB, "intermediate_size": 8, "num_hidden_layers": LAYERS}
FIELDS |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2 * HALF, "attention_bias": True}
FIELDS |= {"max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
FIELDS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e8}, "tie_word_embeddings": False}


@torch.no_grad()
def recalling_teacher(**fields) -> LlamaForCausalLM:
    """The state has three parts of 64 channels: this token, the token before, the next one."""
    model = LlamaForCausalLM(LlamaConfig(**FIELDS | fields)).eval()
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    one_hot = torch.eye(VOCAB)
    model.model.embed_tokens.weight[:, :VOCAB] = one_hot
    before, recalls = (model.model.layers[index].self_attn for index in (READS_PREVIOUS, RECALLS))
    angles = model.model.rotary_emb.inv_freq  # a token: with q turned back by it, q · k is largest one token back
    strength = 20.0
    before.k_proj.bias[:HALF] = strength
    before.q_proj.bias[:HALF], before.q_proj.bias[HALF : 2 * HALF] = strength * angles.cos(), -strength * angles.sin()
    before.v_proj.weight[:VOCAB, :VOCAB] = one_hot
    before.o_proj.weight[VOCAB : 2 * VOCAB, :VOCAB] = one_hot
    slow = torch.cat([torch.arange(HALF // 2, HALF), HALF + torch.arange(HALF // 2, HALF)])
    recalls.q_proj.weight[slow, :VOCAB] = 5 * one_hot
    recalls.k_proj.weight[slow, VOCAB : 2 * VOCAB] = one_hot
    recalls.v_proj.weight[:VOCAB, :VOCAB] = one_hot
    recalls.o_proj.weight[2 * VOCAB :, :VOCAB] = one_hot
    model.lm_head.weight[:, 2 * VOCAB :] = 10 * one_hot
    return model
