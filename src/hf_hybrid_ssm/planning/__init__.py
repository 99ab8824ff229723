"""Memory by kind and floating-point operations of a training step, and memory of a decoded sequence.

    python -m hf_hybrid_ssm.planning --preset longhorn/125m --gpus 8 --batch 8 --length 1024

Parameters are counted on the meta device. Activations, operations and decoding states are measured by running the
model on fake tensors, which have shapes but no memory; `tests/test_planning.py` compares them with real runs.
"""

from hf_hybrid_ssm.planning.plan import Plan, plan
from hf_hybrid_ssm.planning.setup import Setup

__all__ = ["Plan", "Setup", "plan"]
