"""What a training step and a decoded sequence will take: memory by kind, and floating point operations.

    python -m hf_hybrid_ssm.planning --preset longhorn/125m --gpus 8 --batch 8 --length 1024

Parameters and decoding states are counted on the meta device, where a model has shapes and no memory; activations and
operations follow formulas that `tests/test_planning.py` compares with what small models really keep and compute.
"""

from hf_hybrid_ssm.planning.plan import Plan, plan
from hf_hybrid_ssm.planning.setup import Setup

__all__ = ["Plan", "Setup", "plan"]
