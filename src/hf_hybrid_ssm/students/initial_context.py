"""Context states that start as averages of the past, read as the attention beside them reads tokens.

Their keys, values and queries are maps of a normalised state; with those of the tokens, a state-space model whose
output is an average of the layer's normalised inputs gives average keys and average values: what attention finds in a
long past in which nothing stands out. S4D computes such an average with one of its modes: with eigenvalue -a, b = 1
and c = a / 2 its kernel 2 c b (1 - e^{-Δa}) / a e^{-Δa t} is a weighted mean over 1 / (Δ a) tokens, for either
discretisation. The other modes keep their dynamics and start silent; so does the skip term.
"""

import math
from typing import Any

import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.s4d import S4D
from hf_hybrid_ssm.models.bst.context_states import ContextStates
from hf_hybrid_ssm.students.initial_projections import scaling_of
from hf_hybrid_ssm.students.memory import ContextMemory
from hf_hybrid_ssm.students.norm_gains import gain_of

WINDOWS = (0.25, 16.0)
"""Shortest and longest memory of several filters, in windows of attention; a single one has their geometric mean."""


@torch.no_grad()
def init_context(memory: ContextMemory, attention: Any, input_gain: torch.Tensor) -> None:
    """Set the weights of context states, and of what reads them, from those of the attention beside them; the output
    projection stays as it is.

    State-space models other than S4D keep their own initial values.

    Args:
        attention: of queries, keys, values and output, each projected by itself.
        input_gain: (d,), of the norm of its input (see `norm_gains`).
    """
    context, size = memory.context, attention.head_dim
    memory.q_proj.load_state_dict(attention.q_proj.state_dict())
    sharpness = scaling_of(attention) * math.sqrt(size)  # context states are read with q·k / √e
    if memory.q_norm is not None:
        memory.q_norm.weight.copy_(gain_of(attention.q_norm, size) * sharpness)
    else:
        for parameter in memory.q_proj.parameters():
            parameter.mul_(sharpness)
    if context.k_norm is not None:
        context.k_norm.weight.copy_(gain_of(attention.k_norm, size))
    for ours, theirs in ((context.k_proj, attention.k_proj), (context.v_proj, attention.v_proj)):
        if isinstance(ours, nn.Linear):
            ours.load_state_dict(theirs.state_dict())
        else:  # a matrix for each head, (G, d, e), without bias
            weight: Any = ours.weight
            weight.copy_(theirs.weight.unflatten(0, (context.num_heads, -1)).mT)
    context.norm.weight.copy_(input_gain)
    if context.variant == "mf":
        context.context_ids.zero_()  # memories of different length tell the states apart
    if isinstance(context.ssm, S4D):
        _average(context, context.ssm)


def _average(context: ContextStates, ssm: S4D) -> None:
    filters = len(ssm.log_dt)
    low, high = (torch.tensor(float(windows * context.window)).log() for windows in WINDOWS)
    shares = torch.linspace(0, 1, filters) if filters > 1 else torch.tensor([0.5])
    memory = (low + shares * (high - low)).exp()
    rate = ssm.A_log_real[:, 0].exp().mean()
    ssm.A_log_real[:, 0] = rate.log()
    ssm.A_imag[:, 0] = 0
    ssm.B[:, 0] = torch.tensor([1.0, 0.0])
    ssm.C.zero_()
    ssm.C[:, :, 0, 0] = rate / 2
    ssm.log_dt.copy_(-(memory * rate.cpu()).log().unsqueeze(1).expand_as(ssm.log_dt))
    ssm.D.zero_()
    ssm.clear_kernel_cache()
