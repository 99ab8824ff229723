"""The CPU backend of both scans for diagonal transitions: `native.c`, compiled on first use."""

import torch

from hf_hybrid_ssm.ops.core.native_library import CFunction, library_beside, supports
from hf_hybrid_ssm.ops.linear_scan.custom_ops import (
    channel_op,
    channel_outputs,
    diagonal_op,
    diagonal_scan_by,
    lti_scan_by,
)
from hf_hybrid_ssm.ops.linear_scan.reference import DiagonalInputs, LtiInputs

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


def _channel_forward(inputs: LtiInputs) -> tuple[torch.Tensor, torch.Tensor]:
    u, decay, *others = inputs[:8]
    outputs = channel_outputs(inputs)
    CHANNEL_FORWARD((u, decay.flatten(2), *others, *outputs), inputs.form == "complex")
    return outputs


def _channel_backward(inputs: LtiInputs, dy: torch.Tensor, dfinal: torch.Tensor, trains: bool) -> list[torch.Tensor]:
    u, decay, vector, output, *others = inputs[:8]
    ddecay, dvector, doutput = (torch.zeros_like(tensor) for tensor in (decay, vector, output))
    du, dskip, dstate = torch.empty_like(u), u.new_empty(output.shape[:2]), torch.empty_like(dfinal)
    results = (du, ddecay.flatten(2), dvector, doutput, dskip, dstate)
    given = (u, decay.flatten(2), vector, output, *others, dy, dfinal)
    CHANNEL_BACKWARD((*given, *results), trains, inputs.form == "complex")
    return [du, ddecay, dvector, doutput, dskip, dstate]


_channel = channel_op("hf_hybrid_ssm::lti_scan_native", _channel_forward, _channel_backward, "cpu")
lti_scan_native = lti_scan_by(_channel)


def _diagonal_forward(inputs: DiagonalInputs) -> torch.Tensor:
    h, pairs = torch.empty_like(inputs.x), inputs.decay.dim() == 2
    *floats, out = _floats(pairs, *inputs[:3], h)
    DIAGONAL_FORWARD((*floats, inputs.seq_idx, out), pairs)
    return h


def _diagonal_backward(inputs: DiagonalInputs, dh: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h, decay, *_ = inputs
    dx, ddecay, dstate = torch.empty_like(h), torch.empty_like(decay), h.new_empty(h.shape[0], *h.shape[2:])
    pairs = decay.dim() == 2
    given = (*_floats(pairs, dh, *inputs[:3]), inputs.seq_idx)
    DIAGONAL_BACKWARD((*given, *_floats(pairs, dx, ddecay, dstate)), pairs)
    return dx, ddecay, dstate


def _floats(pairs: bool, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Views of contiguous tensors (..., M), or of `pairs` (..., M, 2) as (..., 2 M)."""
    return [tensor.flatten(-2) if pairs and tensor is not None else tensor for tensor in tensors]


_diagonal = diagonal_op("hf_hybrid_ssm::diagonal_scan_native", _diagonal_forward, _diagonal_backward, "cpu")
diagonal_scan_native = diagonal_scan_by(_diagonal)
