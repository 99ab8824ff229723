"""The Legendre Memory Unit as a layer, and implicit self-attention over it."""

from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.base import Mixer, RowOptions
from hf_hybrid_ssm.layers.offloaded import with_accelerate_hooks
from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.implicit_attention import implicit_attention
from hf_hybrid_ssm.ops.implicit_attention.decoding import LAGGING, apply_deferred, decoder, defer_updates
from hf_hybrid_ssm.ops.legendre_memory import legendre_memory


class LMU(Mixer):
    """The memory of the last `theta` tokens of every channel: (B, L, D) in, (B, L, q, D) out, nothing to train.

    Row i of the memory is the coefficient of the i-th shifted Legendre polynomial; `decode` reads the past back. The
    state is the memory itself, (B, q, D). The constants are a function of (order, theta): see
    `hf_hybrid_ssm.ops.legendre_memory.constants`.

    Args:
        hidden_size: D.
        order: q, number of polynomials.
        theta: window, in tokens.
    """

    trainable_choices: ClassVar[tuple[str, ...]] = ("none",)
    supports_bidirectional: ClassVar[bool] = False

    def __init__(self, hidden_size: int, *, order: int = 64, theta: float = 350.0, **options: Any):
        super().__init__(hidden_size, trainable=options.pop("trainable", "none"), **options)
        self.order, self.theta = order, theta

    def mix(
        self, u: torch.Tensor, initial_state: torch.Tensor | None, **rows: Unpack[RowOptions]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return legendre_memory(u, order=self.order, theta=self.theta, initial_state=initial_state, **rows)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.order, self.hidden_size),)

    def decode(self, state: torch.Tensor, delays: torch.Tensor) -> torch.Tensor:
        """What the memory holds of the tokens `delays` steps ago: x_{t-k} ≈ Σ_i P_i(2 (k + 1/2) / theta - 1) m_i.

        Args:
            state: (..., q, D), a state or an output of this layer.
            delays: (K,) how many tokens back, from 0 to theta.

        Returns:
            (..., K, D). Frequencies above q / (pi theta) cycles per token are not in the memory.
        """
        z = 2 * (delays.to(state.dtype) + 0.5) / self.theta - 1
        polynomials = [torch.ones_like(z), z]
        for i in range(1, self.order - 1):  # the recurrence; sums of binomials cancel beyond i = 20
            polynomials.append(((2 * i + 1) * z * polynomials[i] - i * polynomials[i - 1]) / (i + 1))
        return torch.stack(polynomials[: self.order], 1) @ state

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, order={self.order}, theta={self.theta}"


class ImplicitAttention(nn.Module):
    """Attention among a token's own polynomial coefficients, reduced to q' of them (equations 8 to 11).

    Args:
        order: q.
        reduced_order: q'.
        theta: window of the memory, in tokens.
        activation: of queries, keys and values.
        scale: of the logits.
        form: "auto", "chunked", "fft" or "recurrent".
        bias: a bias for each row of the reductions, and one of the output.
    """

    def __init__(
        self,
        order: int,
        reduced_order: int,
        theta: float,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor],
        scale: float = 1.0,
        form: str = "auto",
        bias: bool = True,
    ):
        super().__init__()
        self.theta, self.activation, self.scale, self.form = theta, activation, scale, form
        self.reduce_weight = nn.Parameter(torch.randn(3, reduced_order, order) * order**-0.5)
        self.reduce_bias = nn.Parameter(torch.zeros(3, reduced_order)) if bias else None
        self.collapse_weight = nn.Parameter(torch.randn(reduced_order) * reduced_order**-0.5)
        self.collapse_bias = nn.Parameter(torch.zeros(1)) if bias else None

    def forward(self, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, L, D) → (B, L, D) and the memory (B, q, D) or None; options as of `ops.implicit_attention`."""
        options |= {"activation": self.activation, "form": self.form}
        return implicit_attention(x, **self._parameters_in(x.dtype), **options)

    def continue_from(
        self, states: States, x: torch.Tensor, *, return_final_state: bool, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """As `forward`, from and to what a cache keeps: a memory, which may lag behind the tokens (`decoding`)."""
        decode_token = decoder(x, self.activation) if return_final_state and self.form == "auto" else None
        is_plain = options.get("lengths") is None and not torch.is_grad_enabled()
        if decode_token is not None and "recent" in states and x.shape[1] == 1 and is_plain:
            y, *after = self._decode(decode_token, x[:, 0], *(states[name] for name in LAGGING))
            return y.unsqueeze(1), dict(zip(LAGGING, after))
        memory = apply_deferred(states, self.theta)
        y, memory = self(x, initial_state=memory, return_final_state=return_final_state, **options)
        if memory is None:
            return y, {}
        return y, defer_updates(memory) if decode_token is not None or "recent" in states else {"memory": memory}

    @with_accelerate_hooks
    def _decode(self, decode_token: Callable, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return decode_token(*tensors, **self._parameters_in(tensors[0].dtype))

    def _parameters_in(self, dtype: torch.dtype) -> dict[str, Any]:
        parameters = (self.reduce_weight, self.reduce_bias, self.collapse_weight, self.collapse_bias)
        weight, bias, collapse, collapse_bias = (None if p is None else p.to(dtype) for p in parameters)
        arrays = {"weight": weight, "bias": bias, "collapse": collapse, "collapse_bias": collapse_bias}
        return {**arrays, "theta": self.theta, "scale": self.scale}
