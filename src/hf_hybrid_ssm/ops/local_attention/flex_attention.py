"""Local attention on CUDA: FlexAttention, one kernel that holds neither copies of the keys nor a matrix of logits.

Bias and mask are functions of the indices of tokens; blocks outside of the window are never visited. A sink scales the
result: beside keys of total weight exp(l), one of weight exp(s) leaves them exp(l) / (exp(l) + exp(s)).
"""

import importlib.util
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes

from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.transforms import float32_precision
from hf_hybrid_ssm.ops.local_attention.distance_range import Limits, zero_key_logits
from hf_hybrid_ssm.ops.local_attention.inputs import AttentionInputs
from hf_hybrid_ssm.ops.local_attention.sink import beside_sink
from hf_hybrid_ssm.ops.local_attention.torch_backend import local_attention_torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 128  # tokens of a side of what is visited or skipped as a whole
LEAST_HEAD = 16  # what a tensor core multiplies at once
OPTIONS: dict[str, Any] = {"fullgraph": True}  # else it would silently hold all logits
# newer versions of torch ask otherwise for the log of the summed weights
LOG_SUM: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if FlexAttention can be compiled for such tensors, else the reason it cannot."""
    if dtype not in DTYPES:
        return f"FlexAttention takes float32, bfloat16 and float16, not {dtype}"
    if device_type != "cuda":
        return f"FlexAttention has gradients on CUDA devices, not on {device_type}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
        return f"FlexAttention of torch {torch.__version__} is too old: 2.8 has gradients for the bias and the log-sum"
    return None if importlib.util.find_spec("triton") else "FlexAttention is compiled by Triton, which is missing"


def local_attention_triton(inputs: AttentionInputs) -> torch.Tensor:
    """As `local_attention_torch`, which takes over what this does not (dropout, softcap, an initial state), what would
    not fill a block, and causal chunks without a bias, for which torch has a kernel."""
    q, k, v, window, scale, bias, sink_logits, sink_values, _, zero_kv_sink, *_ = inputs
    few, has_sink = q.shape[2] < BLOCK or min(q.shape[3], v.shape[3]) < LEAST_HEAD, sink_logits is not None
    by_torch = inputs.dropout or inputs.softcap is not None or inputs.state is not None
    if few or by_torch or inputs.is_causal_by_chunk:
        return local_attention_torch(inputs)
    (left, right), length, lengths, ranges = window, q.shape[2], inputs.lengths, inputs.ranges()
    k, v = zero_beyond(k, lengths, dim=2), zero_beyond(v, lengths, dim=2)
    first, last = (limit.expand(q.shape[0], length).contiguous() for limit in ranges[:2])  # of one layout: one kernel

    def sees(row: torch.Tensor, head: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (i - j >= first[row, i]) & (i - j <= last[row, i])

    score_mod = None
    if bias is not None:

        def with_bias(
            score: torch.Tensor, row: torch.Tensor, head: torch.Tensor, i: torch.Tensor, j: torch.Tensor
        ) -> torch.Tensor:
            column = i - j + (bias.shape[1] // 2 if inputs.two_sided else 0)
            return score + bias[head, column.clamp(0, bias.shape[1] - 1)].to(score.dtype)

        score_mod = with_bias
    visited, indices = _visited(length, window, q.device)
    blocks = BlockMask.from_kv_blocks(visited, indices, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length))
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": blocks, "scale": scale}
    options["enable_gqa"] = bool(q.shape[1] != k.shape[1])  # of symbolic sizes a comparison is not a bool
    attend = _flex(q, _kind(inputs, zero_kv_sink or has_sink))
    if not zero_kv_sink and not has_sink:
        return attend(q, k, v, **options)
    y, total = attend(q, k, v, **options, **LOG_SUM)
    total = total if isinstance(total, torch.Tensor) else total.lse
    if zero_kv_sink:
        sink_logits = zero_key_logits(bias, ranges.rank, left, right, total.new_empty(0))
    assert sink_logits is not None  # without a sink it has returned
    return beside_sink(y, total, sink_logits, sink_values)


@lru_cache(maxsize=16)
def _visited(length: int, window: Limits, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries visits, (1, 1, n), and which, (1, 1, n, n); both int32."""
    with torch.inference_mode(False), _disable_current_modes():
        begin = torch.arange(0, length, BLOCK, device=device)
        count = len(begin)
        lowest, highest = torch.zeros_like(begin), torch.full_like(begin, count - 1)
        if window[0] is not None:
            lowest = ((begin - window[0]) // BLOCK).clamp(min=0)
        if window[1] is not None:
            highest = ((begin + BLOCK - 1 + window[1]) // BLOCK).clamp(max=count - 1)
        indices = (lowest.unsqueeze(1) + torch.arange(count, device=device)).clamp(max=count - 1)
        return (highest - lowest + 1).int()[None, None], indices.int()[None, None]


def _kind(inputs: AttentionInputs, has_sink: bool) -> tuple:
    """What another value of compiles anew; lengths and, above one, batches do not."""
    q, k, v, _, scale, bias, *_ = inputs
    sizes = (q.shape[0] == 1, q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device)
    column = None if bias is None else (bias.shape, bias.dtype, inputs.two_sided)
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, bias))
    return (*sizes, column, gradients, scale, has_sink, float32_precision())


def _flex(q: torch.Tensor, kind: tuple) -> Any:
    """FlexAttention, compiled unless a compiler is at work already; on a CPU, where only tests run it, as it is."""
    return flex_attention if torch.compiler.is_compiling() or not _is_compiled(q) else _compiled(kind)


def _is_compiled(q: torch.Tensor) -> bool:
    return q.device.type != "cpu"


@cache
def _compiled(kind: tuple) -> Any:
    """torch keeps eight compiled forms of a function's code and refuses a ninth, so each configuration has code of its
    own; its forms are those of one length, and of any."""
    name = f"flex_attention_{_compiled.cache_info().currsize}"
    own = FunctionType(
        flex_attention.__code__.replace(co_name=name),
        flex_attention.__globals__,
        name,
        flex_attention.__defaults__,
        flex_attention.__closure__,
    )
    own.__kwdefaults__ = flex_attention.__kwdefaults__
    return torch.compile(own, **OPTIONS)
