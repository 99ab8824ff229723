"""The CPU backend of both scans for diagonal transitions: `native.c`, compiled on first use."""

import torch

from hf_hybrid_ssm.ops.core.c_function import CFunction
from hf_hybrid_ssm.ops.core.native_library import library_beside, supports
from hf_hybrid_ssm.ops.linear_scan.custom_ops import channel_op, diagonal_op, diagonal_scan_by, lti_scan_by

__all__ = ["diagonal_scan_native", "lti_scan_native", "supports"]


_library = library_beside(__file__)
_CHANNELS = """u[B L D], decay[F D N] float64, vector[F D N], output[F D N], skip?[F D], initial?[B F D N],
    seq_idx?[B L] int64, lengths?[B] int64"""
CHANNEL_FORWARD = CFunction(
    _library, "lti_scan_forward", f"{_CHANNELS}, y[B L F D], final[B F D N]", "B, L, F, D, N, is_complex"
)
CHANNEL_BACKWARD = CFunction(
    _library,
    "lti_scan_backward",
    f"""{_CHANNELS}, dy[B L F D], dfinal[B F D N], du[B L D], ddecay[F D N] float64, dvector[F D N], doutput[F D N],
    dskip[F D], dinitial[B F D N]""",
    "trains, B, L, F, D, N, is_complex",
)
# W floats of a token, two for a complex number
DIAGONAL_FORWARD = CFunction(
    _library,
    "diagonal_scan_forward",
    "x[B L W], decay[W] float64, initial?[B W], seq_idx?[B L] int64, h[B L W]",
    "B, L, W, is_complex",
)
DIAGONAL_BACKWARD = CFunction(
    _library,
    "diagonal_scan_backward",
    """dh[B L W], h[B L W], decay[W] float64, initial?[B W], seq_idx?[B L] int64, dx[B L W], ddecay[W] float64,
    dinitial[B W]""",
    "B, L, W, is_complex",
)


def _channel_forward(
    u: torch.Tensor,
    decay: torch.Tensor,
    vector: torch.Tensor,
    output: torch.Tensor,
    skip: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    is_complex: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    y, final = u.new_empty(batch, length, filters, channels), u.new_empty(batch, filters, channels, size)
    system = (decay.flatten(2), vector, output)
    CHANNEL_FORWARD((u, *system, skip, initial_state, seq_idx, lengths, y, final), is_complex)
    return y, final


def _channel_backward(
    u: torch.Tensor,
    decay: torch.Tensor,
    vector: torch.Tensor,
    output: torch.Tensor,
    skip: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    dy: torch.Tensor,
    dfinal: torch.Tensor,
    is_complex: bool,
    trains: bool,
) -> list[torch.Tensor]:
    filters, channels, _ = output.shape
    ddecay, dvector, doutput = (torch.zeros_like(tensor) for tensor in (decay, vector, output))
    du, dskip, dinitial = torch.empty_like(u), u.new_empty(filters, channels), torch.empty_like(dfinal)
    inputs = (u, decay.flatten(2), vector, output, skip, initial_state, seq_idx, lengths, dy, dfinal)
    CHANNEL_BACKWARD((*inputs, du, ddecay.flatten(2), dvector, doutput, dskip, dinitial), trains, is_complex)
    return [du, ddecay, dvector, doutput, dskip, dinitial]


_channel = channel_op("hf_hybrid_ssm::lti_scan_native", _channel_forward, _channel_backward, "cpu")
lti_scan_native = lti_scan_by(_channel)


def _diagonal_forward(
    x: torch.Tensor, decay: torch.Tensor, initial_state: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> torch.Tensor:
    h = torch.empty_like(x)
    pairs = decay.dim() == 2
    *inputs, out = _floats(pairs, x, decay, initial_state, h)
    DIAGONAL_FORWARD((*inputs, seq_idx, out), pairs)
    return h


def _diagonal_backward(
    dh: torch.Tensor,
    h: torch.Tensor,
    decay: torch.Tensor,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    dx, ddecay, dinitial = torch.empty_like(h), torch.empty_like(decay), h.new_empty(h.shape[0], *h.shape[2:])
    pairs = decay.dim() == 2
    inputs = _floats(pairs, dh, h, decay, initial_state)
    DIAGONAL_BACKWARD((*inputs, seq_idx, *_floats(pairs, dx, ddecay, dinitial)), pairs)
    return dx, ddecay, dinitial


def _floats(pairs: bool, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Views of contiguous tensors (..., M), or of `pairs` (..., M, 2) as (..., 2 M)."""
    return [tensor.flatten(-2) if pairs and tensor is not None else tensor for tensor in tensors]


_diagonal = diagonal_op("hf_hybrid_ssm::diagonal_scan_native", _diagonal_forward, _diagonal_backward, "cpu")
diagonal_scan_native = diagonal_scan_by(_diagonal)
