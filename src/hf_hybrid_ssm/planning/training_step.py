"""The plan of one training step: what is held, and what is computed."""

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.planning.measurement import blocks_of, measure_step
from hf_hybrid_ssm.planning.presets import meta_model
from hf_hybrid_ssm.planning.setup import Setup


@dataclass(frozen=True)
class Plan:
    """Bytes on each device, and operations.

    Args:
        parameters: number of parameters, tied ones once.
        trainable: of these, how many train.
        memory: kind → bytes on each device.
        forward_flops: kind → operations of the forward of one device's batch.
        step_flops: of forward and backward, over all devices.
        state: bytes of one decoded sequence of the row's length, as the kernels keep it; 0 for what does not decode.
    """

    parameters: int
    trainable: int
    memory: dict[str, int]
    forward_flops: dict[str, float]
    step_flops: float
    state: int

    @property
    def total(self) -> int:
        """Bytes on each device at the peak of the backward: everything at once, an upper bound."""
        return sum(self.memory.values())


def plan(config: PreTrainedConfig, setup: Setup | None = None) -> Plan:
    """What a training step of a model takes.

    Args:
        config: of any family of this package.
        setup: the step; `Setup()` by default.
    """
    setup = setup or Setup()
    model, step = meta_model(config, setup.dtype), measure_step(config, setup)
    activations = {"activations": step.activations, "recomputed": step.recomputed, "logits": step.logits}
    return Plan(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        memory=weights(model, setup) | activations,
        forward_flops=step.forward_flops,
        step_flops=step.step_flops * setup.gpus,
        state=step.state,
    )


def shard_bytes(shape: tuple[int, ...], size: int, shards: int) -> int:
    """The largest shard of a tensor: FSDP2 cuts its first dimension."""
    if not shape:
        return size
    rest = size
    for extent in shape[1:]:
        rest *= extent
    return -(-shape[0] // shards) * rest


def weights(model: PreTrainedModel, setup: Setup) -> dict[str, int]:
    """Parameters, gradients and optimizer state on each device."""
    shards = setup.gpus if setup.sharding == "fsdp2" else 1
    by_kind = dict.fromkeys(("parameters", "gradients", "optimizer", "gathered", "buckets"), 0)
    for parameter in model.parameters():
        size = shard_bytes(tuple(parameter.shape), parameter.element_size(), shards)
        by_kind["parameters"] += size
        if parameter.requires_grad:
            by_kind["gradients"] += size
            if setup.optimizer == "adamw":  # two moments in the parameter's dtype, and a float32 count of steps
                by_kind["optimizer"] += 2 * size + 4
    if setup.sharding == "ddp":
        # DDP reduces gradients in buckets, which hold them a second time
        by_kind["buckets"] = by_kind["gradients"] if setup.gpus > 1 else 0
    elif setup.gpus > 1:
        # one layer's parameters and gradients are gathered at a time; those outside of layers stay gathered
        blocks = blocks_of(model)
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
        outside = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
        by_kind["gathered"] = 2 * setup.computing * (largest + outside)
    return by_kind
