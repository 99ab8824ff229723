"""(d) Window attention against FlexAttention, flash-attention, and a masked full attention."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu.comparing import compare
from benchmarks.gpu.scan import Run, lazily, run_of, tensors
from benchmarks.gpu.settings import Settings
from benchmarks.timing import peak_megabytes_of
from hf_hybrid_ssm.ops.local_attention import local_attention

KINDS = ("bare", "biased", "biased with zero sink")
# batch, heads, length, size of a head, window; every kind and shape is compiled anew, so few
SHAPES = {(8, 12, 4096, 64, 512): KINDS, (8, 16, 2048, 64, 128): KINDS[1:2], (1, 16, 32768, 64, 512): KINDS[:1]}
TINY = {(1, 2, 32, 16, 8): KINDS}


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for shape, kinds in settings.pick(SHAPES, TINY).items():
        for kind in kinds:
            for backward in (False, True):
                name = f"{shape} {kind} {'forward and backward' if backward else 'forward'}"
                yield name, lambda s=shape, k=kind, b=backward: window(settings, s, k, b)


def window(settings: Settings, shape: tuple, kind: str, backward: bool) -> dict:
    batch, heads, length, size, width = shape
    q, k, v = tensors(settings, *[(batch, heads, length, size)] * 3)
    bias = tensors(settings, (heads, width))[0] if kind != "bare" else None
    inputs = [q, k, v] if bias is None else [q, k, v, bias]
    options = {"window": (width - 1, 0), "bias": bias, "zero_kv_sink": kind == "biased with zero sink"}
    ours = run_of(lambda: local_attention(q, k, v, **options)[0], inputs, backward)
    candidates = {"ours": ours}
    if not options["zero_kv_sink"]:
        candidates["FlexAttention"] = flex(settings, inputs, width, backward)
    if bias is None:
        candidates["flash-attention"] = flash(q, k, v, width, backward)
        candidates["masked full attention"] = masked(q, k, v, width, backward)
    found = compare(candidates, settings)
    products = 4 * batch * heads * length * width * size * (3.5 if backward else 1)  # of pairs within the window
    return {
        **found,
        "teraflops": round(products / found["milliseconds"]["ours"] / 1e9, 2),
        "peak_megabytes": round(peak_megabytes_of(ours, settings.device), 1),
    }


def flex(settings: Settings, inputs: list[torch.Tensor], width: int, backward: bool) -> Run:
    """With the bias as a `score_mod`."""

    def prepared() -> Run:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v, *rest = inputs if backward else [t.detach() for t in inputs]
        length = q.shape[2]
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (i - j < width), None, None, length, length, device=settings.device
        )
        score = None
        if rest:
            bias = rest[0]

            def score(value, b, h, i, j):
                return value + bias[h, (i - j).clamp(0, width - 1)]

        attention = torch.compile(flex_attention, dynamic=False) if settings.device == "cuda" else flex_attention
        return run_of(lambda: attention(q, k, v, score_mod=score, block_mask=mask), inputs, backward)

    return lazily(prepared)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int, backward: bool) -> Run:
    def prepared() -> Run:
        from flash_attn import flash_attn_func

        rows = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]
        return run_of(lambda: flash_attn_func(*rows, causal=True, window_size=(width - 1, 0)), rows, backward)

    return lazily(prepared)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int, backward: bool) -> Run:
    def prepared() -> Run:
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position
        mask = (distance >= 0) & (distance < width)
        return run_of(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), [q, k, v], backward)

    return lazily(prepared)
