"""Memory of students: a Longhorn mixer or context states beside a window, or a mixer in the place of attention.

A memory reads what the teacher's attention reads, and its output is added to that of attention (before the residual
connection). Both keep their states in one layer of the cache. Hooks on the teacher's modules bring it what it reads.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from hf_hybrid_ssm.layers.plain_tensors import whole_shape
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import ContextStates
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornMixer
from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan
from hf_hybrid_ssm.students.configuration import LayerPlan
from hf_hybrid_ssm.students.forward import Beside, Forward
from hf_hybrid_ssm.students.sinks import rotated
from hf_hybrid_ssm.students.teacher import AttentionLayer

HEADS = {"q_proj", "k_proj", "v_proj", "o_proj"}


class HeadMixer(LonghornMixer):
    """A Longhorn mixer with the heads of the attention beside it: keys and queries are projected from its input, with
    that attention's norms and rotation, and each head has its share of the channels."""

    takes_pages = False  # nor does the window beside it

    def __init__(self, config: LonghornConfig, layer_idx: int, attention: Any, layer: AttentionLayer, rotate: Any):
        super().__init__(config, layer_idx)
        if config.intermediate_size % layer.heads:
            raise ValueError(
                f"{layer.heads} heads of attention must divide the {config.intermediate_size} channels of a mixer "
                "beside it (expand * hidden_size): give another `expand`."
            )
        self.num_heads, self.state_size = layer.heads, config.state_size
        self.turned, self.rotate = layer.turned or 0, rotate
        self.x_proj = nn.Linear(config.intermediate_size, int(config.time_step_rank), bias=False)
        size = self.num_heads * self.state_size
        self.q_proj, self.k_proj = (nn.Linear(config.hidden_size, size, bias=config.use_bias) for _ in range(2))
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = (None if norm is None else _copied(norm) for norm in norms)

    def inputs_of(self, z: torch.Tensor, x: torch.Tensor | None, angles: Any) -> tuple[torch.Tensor, ...]:
        """The input of attention (B, L, d), and angles (B, L, ...) where keys are turned."""
        return (z, *(part.expand(z.shape[0], -1, -1) for part in angles)) if self.turned else (z,)

    def forward(self, *inputs: torch.Tensor, past: States, rows: Rows) -> tuple[torch.Tensor, States]:  # type: ignore[override]
        """As of `RecurrentMixin.forward_rows`."""
        return self.forward_rows(*inputs, past=past, rows=rows)

    def forward_rows(
        self, u: torch.Tensor, *angles: torch.Tensor, past: States, rows: Rows
    ) -> tuple[torch.Tensor, States]:
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x, conv = self.conv1d(x, rows, past.get("conv"))
        k, q = (
            self._heads(projection, norm, u, angles).to(x.dtype)  # under autocast a norm gives float32
            for projection, norm in ((self.k_proj, self.k_norm), (self.q_proj, self.q_norm))
        )
        y, scan = longhorn_scan(
            x,
            self.dt_proj(self.x_proj(x)),
            k,
            q,
            beta_bias=self.dt_bias,
            D=self.D,
            z=z,
            rows=rows,
            initial_state=past.get("scan"),
        )
        return self.out_proj(y), {} if conv is None else {"conv": conv, "scan": scan}

    def states_after(self, *inputs: torch.Tensor, past: States, rows: Rows, **options: Any) -> States:
        return self(*inputs, past=past, rows=rows)[1]

    def _heads(self, projection: Any, norm: Any, u: torch.Tensor, angles: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Keys or queries (B, L, H, e)."""
        heads = projection(u).unflatten(-1, (self.num_heads, self.state_size))
        heads = heads if norm is None else norm(heads)
        if not angles:
            return heads
        return rotated(self.rotate, heads.transpose(1, 2), (angles[0], angles[1]), self.turned).transpose(1, 2)


class GroupedContextStates(ContextStates):
    """Context states whose keys and values are in groups that queries share, with the bias and the norm of the
    attention beside them."""

    def __init__(self, config: BstConfig, groups: int, has_bias: bool, has_norms: bool):
        super().__init__(config, num_heads=groups, bias=has_bias)
        self.k_norm = RMSNorm(config.head_dim, eps=config.layer_norm_epsilon) if has_norms else None

    def normalised(self, keys: torch.Tensor, is_step: bool = False) -> torch.Tensor:
        """As in `ContextStates`."""
        return keys if self.k_norm is None else self.k_norm(keys).to(keys.dtype)  # under autocast it is float32


class ContextMemory(nn.Module):
    """Context states of the Block-State Transformer: tokens attend to them with queries of their own, and what they
    find is mapped back beside the output of attention.

    Args:
        config: its `num_attention_heads` are those of the attention beside, which shares `groups` of keys and values,
            and has biases or norms of each head.
    """

    def __init__(self, config: BstConfig, groups: int, has_bias: bool, has_norms: bool):
        super().__init__()
        inner = config.num_attention_heads * config.head_dim
        self.num_heads = config.num_attention_heads
        self.context = GroupedContextStates(config, groups, has_bias, has_norms)
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=has_bias)
        self.q_norm = RMSNorm(config.head_dim, eps=config.layer_norm_epsilon) if has_norms else None
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def inputs_of(self, z: torch.Tensor, x: torch.Tensor | None, angles: Any) -> tuple[torch.Tensor, ...]:
        """The inputs (B, L, d) of attention and of its layer."""
        assert x is not None  # the layer has a hook
        return z, x

    def forward(self, z: torch.Tensor, x: torch.Tensor, *, past: States, rows: Rows) -> tuple[torch.Tensor, States]:
        """As of `RecurrentMixin.forward_rows`."""
        queries = self.q_proj(z).unflatten(2, (self.num_heads, -1))
        queries = queries if self.q_norm is None else self.q_norm(queries).to(queries.dtype)
        found, states = self.context(queries, x, past, rows, head_scale=None)
        return self.o_proj(found.flatten(2)), states

    def states_after(self, *inputs: torch.Tensor, past: States, rows: Rows) -> States:
        return self(*inputs, past=past, rows=rows)[1]


class MemoryInstead(nn.Module):
    """In the place of a teacher's attention module."""

    def __init__(self, memory: LonghornMixer):
        super().__init__()
        self.layer_idx, self.memory = memory.layer_idx, memory

    def forward(self, hidden_states: torch.Tensor, *args: Any, student: Any = None, **kwargs: Any) -> tuple:
        known = isinstance(student, Forward)
        return self.memory(hidden_states, student.rows if known else None, student.cache if known else None), None


def _copied(norm: nn.Module) -> nn.Module:
    """Another one; of whole weights where DeepSpeed has left a part of them here (ZeRO-3), which are loaded later."""
    copied = copy.deepcopy(norm)
    for path, module in norm.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if whole_shape(weight) != weight.shape:
                whole = nn.Parameter(torch.ones(whole_shape(weight), dtype=weight.dtype))
                copied.get_submodule(path).register_parameter(name, whole)
    return copied


def add_memory(base: Any, index: int, plan: LayerPlan, layer: AttentionLayer, rotate: Any, fields: dict) -> None:
    """Put the memory of a layer into the base model of a student.

    Args:
        rotate: the teacher's `apply_rotary_pos_emb`.
        fields: of `LonghornConfig` or `BstConfig`.

    Raises:
        ValueError: the layer's attention is not what a memory can stand beside, or a field is not one of the memory.
    """
    attention, config = base.get_submodule(layer.name), base.config
    if not plan.is_windowed:
        mixer = LonghornMixer(_longhorn(config, fields), index)
        base.set_submodule(layer.name, MemoryInstead(mixer))
        return
    own = {name for name, _ in attention.named_children()} - {"sink"}
    with_norms = {"q_norm", "k_norm"} <= own
    norms = [norm.weight for name, norm in attention.named_children() if name in ("q_norm", "k_norm")]
    sizes = {whole_shape(weight).numel() for weight in norms}
    if own - {"q_norm", "k_norm"} != HEADS or sizes - {layer.key_size} or layer.turned is None:
        raise ValueError(
            f"student.layers[{index}].memory={plan.memory!r} stands beside attention of {', '.join(sorted(HEADS))}, "
            f"perhaps with norms of each head; {layer.name} has {', '.join(sorted(own))}: give attention='none'."
        )
    if plan.memory == "longhorn":
        inner = layer.heads * layer.key_size
        heads = {"state_size": layer.key_size, "expand": -(-2 * inner // config.hidden_size)}
        attention.memory = HeadMixer(_longhorn(config, heads | fields), index, attention, layer, rotate)
    else:
        has_bias = attention.k_proj.bias is not None
        attention.memory = ContextMemory(_context(config, plan, layer, fields), layer.groups, has_bias, with_norms)
        base.get_submodule(layer.name.rpartition(".")[0]).register_forward_pre_hook(_with_input, with_kwargs=True)
    attention.register_forward_pre_hook(_before, with_kwargs=True)
    attention.register_forward_hook(_after, with_kwargs=True)


def _longhorn(config: Any, fields: dict) -> LonghornConfig:
    known = {"hidden_size": config.hidden_size, "num_hidden_layers": 1, "state_size": 32, "use_bias": True}
    return LonghornConfig(**known | fields)


def _context(config: Any, plan: LayerPlan, layer: AttentionLayer, fields: dict) -> BstConfig:
    known = {"hidden_size": config.hidden_size, "num_hidden_layers": 1, "sliding_window": plan.window}
    known |= {"num_attention_heads": layer.heads, "head_dim": layer.key_size, "qk_norm": False}
    known |= {"layer_norm_epsilon": getattr(config, "rms_norm_eps", 1e-6)}
    return BstConfig(**known | fields)


def _with_input(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The input of the layer, for memories that read it."""
    forward = kwargs.get("student")
    if not isinstance(forward, Forward):
        return None
    return args, kwargs | {"student": replace(forward, layer_input=args[0] if args else kwargs["hidden_states"])}


def _before(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    forward = kwargs.get("student")
    if not isinstance(forward, Forward):
        return None
    z = args[0] if args else kwargs["hidden_states"]
    inputs = module.memory.inputs_of(z, forward.layer_input, kwargs.get("position_embeddings"))
    return args, kwargs | {"student": replace(forward, beside=Beside(module.memory, inputs))}


def _after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    forward = kwargs.get("student")
    if not isinstance(forward, Forward) or forward.beside is None or forward.beside.output is None:
        return None
    attended, dropout = output[0], module.windowed.window_dropout
    if module.training and dropout > 0:
        is_open = torch.rand(attended.shape[0], 1, 1, device=attended.device) >= dropout
        attended = torch.where(is_open, attended, 0.0)
    return attended + forward.beside.output, *output[1:]


@torch.no_grad()
def initialise(module: Any) -> bool:
    """Initial values of a memory's own parameters, which is closed; False for a module of another kind."""
    if isinstance(module, LonghornMixer):
        init.zeros_(module.dt_bias)
        init.ones_(module.D)
        _close(module.out_proj)
    elif isinstance(module, ContextMemory):
        _close(module.o_proj)
    elif isinstance(module, RMSNorm):
        init.ones_(module.weight)
    else:
        return False
    return True


def _close(projection: nn.Linear) -> None:
    if getattr(projection, "weight", None) is None:
        return  # a quantizer's map, whose codes were loaded
    init.zeros_(projection.weight)
    if projection.bias is not None:
        init.zeros_(projection.bias)
