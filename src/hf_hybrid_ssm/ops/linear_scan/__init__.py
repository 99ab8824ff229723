"""Linear recurrences: a diagonal one whose states are the result, and a small system for every channel."""

from hf_hybrid_ssm.ops.linear_scan.channel import ChannelSystem, channel_scan, has_fused_scan, long_kernel
from hf_hybrid_ssm.ops.linear_scan.channel_blocks import BlockMatrices, block_matrices
from hf_hybrid_ssm.ops.linear_scan.diagonal import diagonal_scan
from hf_hybrid_ssm.ops.linear_scan.transition import Transition

__all__ = [
    "BlockMatrices",
    "ChannelSystem",
    "Transition",
    "block_matrices",
    "channel_scan",
    "diagonal_scan",
    "has_fused_scan",
    "long_kernel",
]
