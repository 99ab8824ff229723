"""Memory by kind and floating-point operations of a training step, and memory of a decoded sequence.

    hf-hybrid-ssm plan longhorn/125m --gpus 8 --batch 8 --length 1024

Parameters are counted on the meta device. Activations, operations and decoding states are measured by running the
model on fake tensors, which have shapes but no memory; `tests/test_planning.py` compares them with real runs.
"""

from hf_hybrid_ssm.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__, {"Plan": f"{__name__}.training_step", "Setup": f"{__name__}.setup", "plan": f"{__name__}.training_step"}
)
