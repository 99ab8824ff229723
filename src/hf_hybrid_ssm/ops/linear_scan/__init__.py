"""Linear recurrences in block form: matrix products inside a block, the state carried from block to block."""

from hf_hybrid_ssm.ops.linear_scan.channel import ChannelSystem, Transition, channel_scan, prepare_system
from hf_hybrid_ssm.ops.linear_scan.diagonal import diagonal_scan

__all__ = ["ChannelSystem", "Transition", "channel_scan", "diagonal_scan", "prepare_system"]
