"""The plan of one training step: what is held, and what is computed."""

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.planning import activations, flops
from hf_hybrid_ssm.planning.decoding import decoding_state_bytes
from hf_hybrid_ssm.planning.presets import is_classifier, meta_model
from hf_hybrid_ssm.planning.setup import Setup


@dataclass(frozen=True)
class Plan:
    """Bytes on each device, and operations.

    Args:
        parameters: number of parameters, tied ones once.
        trainable: of these, how many train.
        memory: kind → bytes on each device.
        flops_per_token: kind → operations of the forward, for each token.
        flops_per_forward: operations of a forward that do not grow with its tokens (kernels of trained filters).
        flops_per_step: of forward and backward, over all devices.
        state: bytes of one decoded sequence of the row's length; 0 for a classifier.
    """

    parameters: int
    trainable: int
    memory: dict[str, int]
    flops_per_token: dict[str, float]
    flops_per_forward: float
    flops_per_step: float
    state: int

    @property
    def total(self) -> int:
        """Bytes on each device at the backward's height: everything at once, as an upper bound."""
        return sum(self.memory.values())


def plan(config: PreTrainedConfig, setup: Setup | None = None) -> Plan:
    """What a training step of a model takes.

    Args:
        config: of any family of this package.
        setup: the step; `Setup()` by default.

    Raises:
        ValueError: the configuration uses a part that is not planned for.
    """
    setup = setup or Setup()
    model = meta_model(config, setup.dtype)
    forward = flops.forward_flops(model, setup.length)
    again = flops.again_flops(config, setup.length, forward, setup.checkpointing)
    rows = 2 if getattr(config, "paired_input", False) else 1
    step = (3 * sum(forward.values()) + again) * setup.tokens * rows
    # a filter's backward costs but 1.5 times its forward, which also makes what only pieces and steps use
    step += (3.5 if setup.checkpointing else 2.5) * flops.filter_flops(config, setup.length)
    return Plan(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        memory=weights(model, setup) | forward_memory(config, setup),
        flops_per_token=forward,
        flops_per_forward=flops.filter_flops(config, setup.length),
        flops_per_step=step * setup.gpus,
        state=0 if is_classifier(config) else decoding_state_bytes(model, setup.length, setup.dtype),
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
    found = dict.fromkeys(("parameters", "gradients", "optimizer", "gathered", "buckets", "casts"), 0)
    for parameter in model.parameters():
        held = shard_bytes(tuple(parameter.shape), parameter.element_size(), shards)
        found["parameters"] += held
        if parameter.requires_grad:
            found["gradients"] += held
            if setup.optimizer == "adamw":  # two moments in the parameter's dtype, and a float32 count of steps
                found["optimizer"] += 2 * held + 4
    if setup.sharding == "ddp":
        # DDP reduces gradients in buckets, which hold them a second time
        found["buckets"] = found["gradients"] if setup.gpus > 1 else 0
        # autocast keeps a cast copy of what it multiplies with until the backward is over
        found["casts"] = 2 * sum(p.numel() for p in model.parameters() if p.dim() >= 2) if setup.mixed else 0
    elif setup.gpus > 1:
        # one layer's parameters and gradients stand whole, besides those outside of layers, which stay
        kinds = set(model._no_split_modules or ())
        blocks = [module for module in model.modules() if type(module).__name__ in kinds]
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
        outside = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
        found["gathered"] = 2 * setup.computing * (largest + outside)
    return found


def forward_memory(config: PreTrainedConfig, setup: Setup) -> dict[str, int]:
    """Activations, the layer that checkpointing computes again, and logits."""
    rows = 2 if getattr(config, "paired_input", False) else 1
    tokens = setup.tokens * rows
    kept, inputs = zip(*activations.layers(config, setup))
    sizes = [layer.per_token * tokens + layer.once for layer in kept]
    last = activations.head(config, setup)
    found = {"activations": last.per_token * tokens, "recomputed": 0.0, "logits": logits_bytes(config, setup)}
    if setup.checkpointing:
        found["activations"] += sum(inputs) * tokens
        found["recomputed"] = max(sizes)
    else:
        found["activations"] += sum(sizes)
    return {kind: round(size) for kind, size in found.items()}


def logits_bytes(config: PreTrainedConfig, setup: Setup) -> int:
    """Logits as the head returns them, their log-softmax and its gradient in float32; nothing where none are held."""
    if is_classifier(config) or getattr(config, "use_linear_cross_entropy", False):
        return 0
    copies = setup.computing + 2 * 4 + (4 if setup.computing < 4 else 0)  # narrow logits are cast before the loss
    return copies * setup.tokens * config.vocab_size
