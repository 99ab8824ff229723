"""The settings of a training step that memory and operations depend on."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZERS = ("adamw", "sgd")
SHARDINGS = ("ddp", "fsdp2")
KERNELS = ("fused", "torch")


@dataclass(frozen=True)
class Setup:
    """One training step.

    Args:
        batch: rows on each device, in one forward.
        length: tokens of a row; of source and target each, for an encoder-decoder.
        gpus: devices.
        sharding: "ddp" (every device holds everything) or "fsdp2" (parameters, gradients and optimizer state in
            shards, gathered a layer at a time).
        dtype: of weights, gradients and optimizer state.
        mixed_precision: compute in bfloat16 although the weights are float32 (`bf16=True` of the Trainer).
        optimizer: "adamw" or "sgd" (without momentum).
        checkpointing: keep the input of each layer only, and compute the layer again in the backward.
        kernels: "fused" (the scan's own kernel, and attention that keeps no scores) or "torch" (plain torch, where
            attention with dropout or with zero keys before the start keeps its scores).
    """

    batch: int = 8
    length: int = 1024
    gpus: int = 1
    sharding: str = "ddp"
    dtype: str = "float32"
    mixed_precision: bool = False
    optimizer: str = "adamw"
    checkpointing: bool = False
    kernels: str = "fused"

    def __post_init__(self) -> None:
        for name in ("batch", "length", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        choices = {"sharding": SHARDINGS, "dtype": tuple(DTYPE_BYTES), "optimizer": OPTIMIZERS, "kernels": KERNELS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, allowed))}.")
        if self.mixed_precision and self.dtype != "float32":
            raise ValueError(f"mixed_precision=True keeps the weights in float32; got dtype={self.dtype!r}.")

    @property
    def computing(self) -> int:
        """Bytes of a number that a projection returns."""
        return 2 if self.mixed_precision else DTYPE_BYTES[self.dtype]
