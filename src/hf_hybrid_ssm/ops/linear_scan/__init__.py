"""Linear recurrences in block form: matrix products inside a block, the state carried from block to block."""

from hf_hybrid_ssm.ops.linear_scan.channel import (
    ChannelSystem,
    channel_scan,
    krylov_vectors,
    long_kernel,
    prepare_powers,
    prepare_system,
)
from hf_hybrid_ssm.ops.linear_scan.diagonal import diagonal_scan
from hf_hybrid_ssm.ops.linear_scan.transition import Transition

__all__ = [
    "ChannelSystem",
    "Transition",
    "channel_scan",
    "diagonal_scan",
    "krylov_vectors",
    "long_kernel",
    "prepare_powers",
    "prepare_system",
]
