"""Ops, mixers and parameter groups with tensors or options that do not fit."""

import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.registry import build_mixer
from hf_hybrid_ssm.ops._core.dispatch import backend
from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.implicit_attention import implicit_attention
from hf_hybrid_ssm.ops.legendre_memory import legendre_memory
from hf_hybrid_ssm.ops.linear_cross_entropy import linear_cross_entropy
from hf_hybrid_ssm.ops.linear_scan import diagonal_scan
from hf_hybrid_ssm.ops.local_attention import empty_state, local_attention
from hf_hybrid_ssm.ops.long_conv import long_conv
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan
from hf_hybrid_ssm.training.optim import parameter_groups
from tests.reliability.refusals import assert_refused, mistakes

X = torch.zeros(2, 6, 4)  # B, L, D
KEYS = torch.zeros(2, 6, 3)  # B, L, N
HEADS = torch.zeros(2, 4, 6, 8)  # B, H, L, E
ONE_WAY = {"window": (2, 0)}


def force(name):
    with backend(name):
        pass


# fmt: off
OPS = [
    (lambda: longhorn_scan(X[0], X, KEYS, KEYS), r"ValueError: x must have shape .*\(6, 4\)"),
    (lambda: longhorn_scan([1.0], X, KEYS, KEYS), "TypeError: x must be a tensor.*got list"),
    (lambda: longhorn_scan(X.long(), X, KEYS, KEYS), "TypeError: x must have a floating.*int64"),
    (lambda: longhorn_scan(X, X, KEYS[:, :5], KEYS), r"ValueError: k .*got \(2, 5, 3\)"),
    (lambda: longhorn_scan(X, X, KEYS, X), r"ValueError: q .*got \(2, 6, 4\)"),
    (lambda: longhorn_scan(X, X, KEYS.double(), KEYS), "TypeError: k must have dtype"),
    (lambda: longhorn_scan(X, KEYS, KEYS, KEYS), r"ValueError: beta_logit .*got \(2, 6, 3\)"),
    (lambda: longhorn_scan(X, X, KEYS, KEYS, beta_bias=torch.zeros(5)),
     r"ValueError: beta_bias must have shape \(D\) = \(4\), got \(5,\)"),
    (lambda: longhorn_scan(X, X, KEYS, KEYS, initial_state=torch.zeros(3, 4, 3)),
     r"ValueError: initial_state .*got \(3, 4, 3\)"),
    (lambda: longhorn_scan(X, X, KEYS, KEYS, lengths=torch.tensor([6, 7])),
     r"ValueError: lengths must lie in 0..6.*\[6, 7\]"),
    (lambda: longhorn_scan(X, X, KEYS, KEYS, lengths=torch.tensor([6.0, 6.0])),
     "TypeError: lengths must be int32 or int64"),
    (lambda: longhorn_scan(X, X, KEYS, KEYS, backend="cuda"),
     "ValueError: backend='cuda' is not a backend; choose one of triton"),
    (lambda: long_conv(X, torch.zeros(4, 3), backend="native"),
     "ValueError: backend='native' was forced but cannot run long_conv: .*no native implementation"),
    (lambda: longhorn_scan(X.double(), X.double(), KEYS.double(), KEYS.double(), backend="native"),
     "ValueError: backend='native' was forced but cannot run longhorn_scan.*float64"),
    (lambda: force("fast"), "ValueError: backend='fast' is not a backend"),
    (lambda: causal_conv(X, torch.zeros(5, 2)), r"ValueError: weight .*got \(5, 2\)"),
    (lambda: causal_conv(X, torch.zeros(4, 0)), "ValueError: weight must have at least one tap.*K = 0"),
    (lambda: causal_conv(X, torch.zeros(4, 2), activation="relu"),
     "ValueError: activation='relu' must be one of None, 'silu'"),
    (lambda: causal_conv(X.long(), torch.zeros(4, 2)),
     "TypeError: x must have a floating point dtype, got torch.int64"),
    (lambda: long_conv(X, torch.zeros(3, 5)), "ValueError: 3 filters.*4"),
    (lambda: long_conv(X, torch.zeros(4, 0)), "ValueError: kernel must have at least one"),
    (lambda: long_conv(X, X[0].T, future_kernel=X[0].T, return_final_state=True),
     "ValueError: return_final_state need a causal convolution"),
    (lambda: long_conv(X, X[0].T, stride=2, positions=torch.zeros(2, 1, dtype=torch.long)),
     "ValueError: stride=2 and positions are two ways"),
    (lambda: long_conv(X, X[0].T, positions=torch.full((2, 1), 6)),
     r"ValueError: positions must lie in 0..5, got 6..6"),
    (lambda: long_conv(X, X[0].T, stride=0), "ValueError: stride must be at least 1, got 0"),
    (lambda: diagonal_scan(torch.ones(3), X), r"ValueError: decay .*\(4\), got \(3,\)"),
    (lambda: diagonal_scan(torch.ones(4), X.half()), "TypeError: x must be float32.*float16"),
    (lambda: local_attention(HEADS, HEADS[:, :3], HEADS[:, :3], **ONE_WAY),
     "ValueError: q must have a multiple of k's 3 heads, got 4"),
    (lambda: local_attention(HEADS, HEADS, HEADS, window=(1, -3)),
     r"ValueError: window=\(1, -3\): left must be at least 0, and at least -right"),
    (lambda: local_attention(HEADS, HEADS, HEADS, chunk_size=0, **ONE_WAY),
     "ValueError: chunk_size must be at least 1, got 0"),
    (lambda: local_attention(HEADS, HEADS, HEADS, window=(2, 2), return_final_state=True),
     r"ValueError: window=\(2, 2\) looks ahead"),
    (lambda: local_attention(HEADS, HEADS, HEADS, window=(2, 2), bias=torch.zeros(4, 4)),
     "ValueError: odd number of distances, got 4"),
    (lambda: local_attention(HEADS, HEADS, HEADS, capacity=1, return_final_state=True, **ONE_WAY),
     "ValueError: capacity=1 is too small: the window needs the last 2"),
    (lambda: local_attention(HEADS, HEADS, HEADS, initial_state=empty_state(2, 4, 1, 8), **ONE_WAY),
     "ValueError: initial_state holds 1 keys, but the window needs the last 2"),
    (lambda: local_attention(HEADS, HEADS, HEADS, dropout=1.5, **ONE_WAY),
     r"ValueError: dropout=1.5 must lie in \[0, 1\)"),
    (lambda: legendre_memory(X, order=0, theta=9.0), "ValueError: order must be .*got 0"),
    (lambda: legendre_memory(X, order=2.5, theta=9.0), "ValueError: order .*got 2.5"),
    (lambda: legendre_memory(X, order=3, theta=-1.0), "ValueError: theta must be positive.*-1"),
    (lambda: legendre_memory(X, order=3, theta=float("inf")),
     "ValueError: theta must be positive and finite, got inf"),
    (lambda: implicit_attention(X, torch.zeros(2, 3, 5), None, torch.zeros(3), theta=9.0),
     r"ValueError: weight must have shape \(3, q', q\).*got \(2, 3, 5\)"),
    (lambda: implicit_attention(X, torch.zeros(3, 3, 5), None, torch.zeros(3), theta=9.0, form="rk4"),
     "ValueError: form='rk4' must be one of 'auto', 'chunked', 'fft', 'recurrent'"),
    (lambda: linear_cross_entropy(X, torch.zeros(9, 5), KEYS[..., 0].long()),
     r"ValueError: weight must have shape .*\(any, 4\), got \(9, 5\)"),
    (lambda: linear_cross_entropy(X, torch.zeros(9, 4), torch.zeros(2, 5, dtype=torch.long)),
     r"ValueError: labels must have shape .*\(2, 6\), got \(2, 5\)"),
    (lambda: linear_cross_entropy(X, torch.zeros(9, 4), torch.full((2, 6), 9)),
     "ValueError: labels has classes from 9 to 9, but weight has 9 rows"),
    (lambda: linear_cross_entropy(X, torch.zeros(9, 4), torch.zeros(2, 6)),
     "TypeError: labels must be int64, got torch.float32"),
    (lambda: linear_cross_entropy(X, torch.zeros(9, 4), KEYS[..., 0].long(), reduction="max"),
     "ValueError: reduction='max' must be one of 'mean', 'sum'"),
    (lambda: linear_cross_entropy(X, torch.zeros(9, 4), KEYS[..., 0].long(), num_items=3),
     'ValueError: num_items is only meaningful with reduction="sum"'),
]
MIXERS = [
    (lambda: build_mixer("s6", 8), "ValueError: no mixer 's6'; choose one of ema"),
    (lambda: build_mixer("lstm", 8, state_size=4), "ValueError: 'lstm'.*state_size"),
    (lambda: build_mixer("s4", 0), "ValueError: hidden_size must be a positive integer, got 0"),
    (lambda: build_mixer("s4", "8"), "ValueError: hidden_size must be a positive integer, got '8'"),
    (lambda: build_mixer("s4d", 8, state_size=3), "ValueError: state_size must be even.*got 3"),
    (lambda: build_mixer("lstm", 7, bidirectional=True), "ValueError: even.*got 7"),
    (lambda: build_mixer("lstm", 8, trainable="output"), "ValueError: trainable='output' must be one of"),
    (lambda: build_mixer("s4", 8)(X), r"ValueError: u must have shape .*got \(2, 6, 4\)"),
    (lambda: build_mixer("s4", 8, bidirectional=True).step(X[:, 0], None), "ValueError: bidirectional S4 has no"),
]
OPTIMIZERS = [
    (lambda: parameter_groups(nn.Linear(2, 2), weight_decay=-1), "ValueError: weight_decay=-1"),
    (lambda: parameter_groups(nn.Linear(2, 2), weight_decay=0, lr=-1), "ValueError: lr=-1 must be"),
    (lambda: parameter_groups(nn.Linear(2, 2).requires_grad_(False), weight_decay=0),
     "ValueError: Linear has no parameter with requires_grad=True"),
]
# fmt: on


@mistakes([*OPS, *MIXERS, *OPTIMIZERS])
def test_mistakes(call, answer):
    assert_refused(call, answer)
