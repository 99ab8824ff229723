"""Long convolutions whose filter is a learned function of position: a plain one, and Hyena (Poli et al., 2023)."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from hf_hybrid_ssm.layers.mixers.base import FrozenMixin, Mixer, MixerState
from hf_hybrid_ssm.layers.mixers.cached_kernel import CachedKernelMixer, fold_token
from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.pages import PagedState
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.local_attention import append_slot, drop_oldest
from hf_hybrid_ssm.ops.long_conv import long_conv


class ImplicitLongConv(CachedKernelMixer):
    r"""y = h * u + D u with h_k = exp(-alpha_c t_k) FFN(pe(k)), t_k = k / (Lf - 1), for k < Lf and zero beyond.

    pe(k) holds t_k and cosines and sines of 2 pi k / Lf at (emb - 1) / 2 frequencies; the FFN has sine activations
    with one learned frequency per hidden unit; the decay rates alpha are fixed, evenly spaced over the channels. The
    time axis is that of `filter_length`, whatever the length of the row.

    The state is exact: the last Lf - 1 inputs, (B, Lf - 1, D).

    Args:
        filter_length: Lf.
        filter_emb, filter_hidden_size, filter_layers, filter_freq: features of pe (odd), hidden width, hidden layers
            after the first, initial frequency of the sines.
        fast_decay, slow_decay, decay_target: alpha runs from ln(1 / target) / slow to ln(1 / target) / fast.
    """

    init_reads_values: ClassVar[bool] = False
    supports_filters: ClassVar[bool] = True
    config_options: ClassVar[dict[str, str]] = {"filter_length": "filter_length"}
    # the published filters train at 1e-3 without weight decay
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("ffn_in", "ffn_in_bias", "ffn", "ffn_bias", "freq", "ffn_out")
    output_parameters: ClassVar[tuple[str, ...]] = ("D",)
    float32_parameters: ClassVar[tuple[str, ...]] = (*dynamics_parameters, *output_parameters)
    ffn_in: nn.Parameter
    ffn_in_bias: nn.Parameter
    ffn: nn.Parameter
    ffn_bias: nn.Parameter
    freq: nn.Parameter
    ffn_out: nn.Parameter
    D: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        *,
        filter_length: int = 4096,
        filter_emb: int = 33,
        filter_hidden_size: int = 64,
        filter_layers: int = 2,
        filter_freq: float = 14.0,
        fast_decay: float = 0.3,
        slow_decay: float = 1.5,
        decay_target: float = 0.01,
        **options: Any,
    ):
        super().__init__(hidden_size, **options)
        if filter_length < 1:
            raise ValueError(f"filter_length must be at least 1, got {filter_length}.")
        if filter_emb < 3 or filter_emb % 2 == 0:
            raise ValueError(f"filter_emb must be odd and at least 3 (time, cosines, sines), got {filter_emb}.")
        if not 0 < fast_decay <= slow_decay or not 0 < decay_target < 1:
            raise ValueError(
                "decays must satisfy 0 < fast_decay <= slow_decay and 0 < decay_target < 1, got "
                f"{fast_decay}, {slow_decay}, {decay_target}."
            )
        self.filter_length = filter_length
        self.filter_emb, self.filter_hidden_size, self.filter_layers = filter_emb, filter_hidden_size, filter_layers
        self.filter_freq = filter_freq
        self.decays = (math.log(1 / decay_target) / slow_decay, math.log(1 / decay_target) / fast_decay)
        self.create_parameters()

    @property
    def _outputs(self) -> int:
        return (2 if self.bidirectional else 1) * (self.num_filters or 1) * self.hidden_size

    def init_parameters(self) -> dict[str, torch.Tensor]:
        width, layers = self.filter_hidden_size, self.filter_layers

        def uniform(fan_in: int, *shape: int) -> torch.Tensor:
            return (2 * torch.rand(shape, dtype=torch.float64) - 1) / math.sqrt(fan_in)

        values = {
            "ffn_in": uniform(self.filter_emb, width, self.filter_emb),
            "ffn_in_bias": uniform(self.filter_emb, width),
            "ffn": uniform(width, layers, width, width),
            "ffn_bias": uniform(width, layers, width),
            "freq": torch.full((width,), self.filter_freq, dtype=torch.float64),
            "ffn_out": uniform(width, self._outputs, width),
            "D": torch.randn(self.num_filters or 1, self.hidden_size, dtype=torch.float64),
        }
        return values

    def kernel(self, length: int, dtype: torch.dtype = torch.float32, direction: int = 0) -> torch.Tensor:
        """h_0 .. h_{length-1} (F, D, length) for length <= filter_length; direction 1 looks ahead (bidirectional)."""
        if not 1 <= length <= self.filter_length:
            raise ValueError(f"length must lie in 1..{self.filter_length} (filter_length), got {length}.")
        kernels = self._cached(
            ("kernel", dtype),
            lambda exact: (
                self._evaluate(self.filter_length, torch.float64).to(dtype) if exact else self._evaluate(length, dtype)
            ),
        )
        return kernels[direction, ..., :length]

    def _evaluate(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """(directions, F, D, length)."""
        k = torch.arange(length, dtype=dtype, device=self.freq.device)
        t = k / max(self.filter_length - 1, 1)
        bands, unit = (self.filter_emb - 1) // 2, 2 * math.pi / self.filter_length
        frequencies = torch.linspace(1e-4 * unit, (bands - 1) * unit, bands, dtype=dtype, device=k.device)
        angles = torch.outer(k, frequencies)
        x = torch.cat([t.unsqueeze(1), torch.cos(angles), -torch.sin(angles)], dim=1)
        freq = self.freq.to(dtype)
        x = torch.sin(freq * F.linear(x, self.ffn_in.to(dtype), self.ffn_in_bias.to(dtype)))
        for weight, bias in zip(self.ffn.to(dtype).unbind(), self.ffn_bias.to(dtype).unbind()):
            x = torch.sin(freq * F.linear(x, weight, bias))
        h = (self.ffn_out.to(dtype) @ x.T).view(-1, self.num_filters or 1, self.hidden_size, length)
        slowest, fastest = self.decays
        rates = torch.linspace(-slowest, -fastest, self.hidden_size, dtype=dtype, device=k.device)
        return h * torch.exp(torch.outer(rates, t))

    def forward_rows(
        self, u: torch.Tensor, initial_state: MixerState | None, rows: Rows, **selection: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if rows.is_step and isinstance(initial_state, torch.Tensor) and selection.get("positions") is None:
            y, after = self._one_token(u, initial_state, rows, is_read=selection.get("stride") in (None, 1))
            return self._squeeze(y), after
        dtype = self._computing_dtype(u)
        stateful = initial_state is not None or rows.return_final_state
        taps = self.filter_length if stateful else max(1, min(self.filter_length, u.shape[1]))
        kernel, ahead = self.kernel(taps, dtype), None
        if self.bidirectional:
            kernel, ahead = fold_token(kernel, self.kernel(taps, dtype, 1))
        skip = self.D.to(dtype)
        options: dict[str, Any] = {"future_kernel": ahead, "skip": skip, "rows": rows, "initial_state": initial_state}
        y, state = long_conv(u, kernel, **options, **selection)
        return self._squeeze(y), state

    def _one_token(
        self, u: torch.Tensor, state: torch.Tensor, rows: Rows, is_read: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y (B, 1, F, D) of a step, none of it (B, 0, F, D) where it is not read; the state moves on along its
        buffer."""
        seen = append_slot(state if rows.overwrites_states else state.clone())  # (B, Lf, D), the token's last
        seen[:, -1:].copy_(u)
        if not is_read:
            return u.new_empty(u.shape[0], 0, self.num_filters or 1, self.hidden_size), drop_oldest(seen)
        dtype = self._computing_dtype(u)
        taps = self._token_taps(dtype)
        with without_autocast(u.device.type):
            y = torch.linalg.vecdot(seen.to(dtype).unsqueeze(1), taps, dim=2)
        return y.to(u.dtype).unsqueeze(1), drop_oldest(seen)

    def _token_taps(self, dtype: torch.dtype) -> torch.Tensor:
        """The filters (F, Lf, D), the token's own tap last, with the skip in it."""

        def compute(exact: bool) -> torch.Tensor:
            kernel = self.kernel(self.filter_length, dtype)
            kernel = torch.cat([kernel[..., :1] + self.D.to(dtype).unsqueeze(-1), kernel[..., 1:]], -1)
            return kernel.flip(-1).mT.contiguous()

        return self._cached(("token", dtype), compute)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.filter_length - 1, self.hidden_size),)


class FrozenLinear(FrozenMixin, nn.Linear):
    """`nn.Linear` whose parameters do not train."""


MIXER_OPTIONS = ("bidirectional", "num_filters", "trainable", "learning_rate", "device", "dtype")  # of every mixer


class Hyena(Mixer):
    r"""Hyena of order 2: (p_0, p_1, v) = shortconv_3(W_in u), z = p_1 v, y = W_out(p_0 (h * z + D z)).

    The short convolution is depthwise with a bias, causal, or centred when bidirectional; `short_weight[:, k]` is the
    tap of lag k (bidirectional: lags 0, 1, -1). The filter is `ImplicitLongConv`, and `filter_*` its arguments.

    The state is the last two rows of W_in u, (B, 2, 3 D), and the filter's own, (B, filter_length - 1, D).
    """

    init_reads_values: ClassVar[bool] = False
    config_options: ClassVar[dict[str, str]] = ImplicitLongConv.config_options
    short_weight: nn.Parameter
    short_bias: nn.Parameter

    def __init__(self, hidden_size: int, **options: Any):
        common = {name: options.pop(name) for name in MIXER_OPTIONS if name in options}
        super().__init__(hidden_size, **common)
        linear = FrozenLinear if self.trainable == "none" else nn.Linear
        self.in_proj = linear(hidden_size, 3 * hidden_size, **self._factory)
        self.out_proj = linear(hidden_size, hidden_size, **self._factory)
        self.filter = ImplicitLongConv(hidden_size, **common, **options)
        self.filter_length = self.filter.filter_length
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        channels = 3 * self.hidden_size
        weight, bias = (2 * torch.rand(channels, n, dtype=torch.float64) - 1 for n in (3, 1))
        return {"short_weight": weight / math.sqrt(3), "short_bias": bias.squeeze(1) / math.sqrt(3)}

    def forward_rows(
        self, u: torch.Tensor, initial_state: MixerState | None, rows: Rows
    ) -> tuple[torch.Tensor, MixerState | None]:
        short, history = (None, None) if initial_state is None else initial_state
        projected = self.in_proj(zero_beyond(u, rows.lengths))
        weight: torch.Tensor = self.short_weight
        ahead = None
        if self.bidirectional:
            weight, ahead = weight[:, :2], weight[:, 2:]
        if rows.is_step and short is not None:
            mixed, last = causal_conv(projected, weight.flip(1), self.short_bias, rows=rows, initial_state=short)
        else:
            mixed, last = long_conv(projected, weight, future_kernel=ahead, rows=rows, initial_state=short)
            mixed = mixed + self.short_bias
        p0, p1, v = mixed.to(u.dtype).chunk(3, dim=-1)
        z, history = self.filter(p1 * v, rows=rows, initial_state=history)
        assert not isinstance(last, PagedState)  # no mixer has pages
        return self.out_proj(p0 * z), None if last is None else (last, history)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (2, 3 * self.hidden_size), (self.filter_length - 1, self.hidden_size)
