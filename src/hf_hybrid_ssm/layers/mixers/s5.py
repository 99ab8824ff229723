"""S5: one diagonal state space with many inputs and outputs for all channels together (Smith et al., 2022)."""

from typing import Any, ClassVar

import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.base import MixerState
from hf_hybrid_ssm.layers.mixers.cached_kernel import CachedKernelMixer
from hf_hybrid_ssm.layers.mixers.hippo import legs_dplr_basis
from hf_hybrid_ssm.layers.mixers.state_space import SSM_FIELDS, complex_pairs, log_uniform_dt, twice_conjugate
from hf_hybrid_ssm.layers.truncated_normal import truncated_normal
from hf_hybrid_ssm.ops.core.complex_pairs import product_of_pairs
from hf_hybrid_ssm.ops.core.output_positions import OutputPositions
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.rows import Documents, Rows
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.linear_scan import diagonal_scan

LARGEST_REAL = -1e-4  # eigenvalues are kept left of it, so that the recurrence stays stable whatever training does


class S5(CachedKernelMixer):
    r"""s_t = Abar s_{t-1} + Bbar u_t, y_t = 2 Re(C s_t) + D u_t, with Abar = e^{dt A}, Bbar = (Abar - 1) / A B.

    The `state_size` = P dimensions are P / 2 conjugate pairs with a step size each, initialised as `blocks` equal
    HiPPO-LegS blocks. Parameters: `A_real`, `A_imag`, `log_dt` (P/2,), `B` (P/2, D, 2), `C` (directions F, D, P/2, 2),
    `D` (F, D). All F filters share the state, (B, P).
    Bidirectional: one scan each way over the same inputs with its own C; both include the token itself.

    Args:
        state_size, blocks: P and the number of HiPPO blocks, which divides P into even parts; by default 8, or the
            largest of 4, 2, 1 that does.
        dt_min, dt_max: range of the initial step sizes.
    """

    init_reads_values: ClassVar[bool] = False
    supports_filters: ClassVar[bool] = True
    config_options: ClassVar[dict[str, str]] = SSM_FIELDS
    default_state_size: ClassVar[int] = 256
    conjugate_pairs: ClassVar[bool] = True
    discretizations: ClassVar[tuple[str, ...]] = ("zoh",)
    trainable_choices: ClassVar[tuple[str, ...]] = ("all", "output", "none")
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("A_real", "A_imag", "B", "log_dt")
    output_parameters: ClassVar[tuple[str, ...]] = ("C", "D")
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_real", "A_imag", "B", "C", "log_dt", "D")
    A_real: nn.Parameter
    A_imag: nn.Parameter
    B: nn.Parameter
    C: nn.Parameter
    log_dt: nn.Parameter
    D: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        *,
        state_size: int = default_state_size,
        blocks: int | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        **options: Any,
    ):
        super().__init__(hidden_size, **options)
        if blocks is None:
            blocks = next(count for count in (8, 4, 2, 1) if count == 1 or state_size % (2 * count) == 0)
        if blocks < 1 or state_size < 2 or state_size % (2 * blocks):
            raise ValueError(f"state_size must be a multiple of 2 blocks = {2 * blocks}, got {state_size}.")
        self.state_size, self.blocks = state_size, blocks
        self.dt_min, self.dt_max = dt_min, dt_max
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        size, blocks, channels = self.state_size, self.blocks, self.hidden_size
        eigenvalues, basis = legs_dplr_basis(size // blocks)  # (p,), (2p, p): p pairs in each block
        outputs = (2 if self.bidirectional else 1) * (self.num_filters or 1)
        b = _truncated_normal(blocks, size // blocks, channels, variance=1 / size)
        c = torch.complex(
            *(_truncated_normal(outputs, channels, blocks, size // blocks, variance=1 / size) for _ in "ri")
        )
        values = {
            "A_real": eigenvalues.real.repeat(blocks),
            "A_imag": eigenvalues.imag.repeat(blocks),
            "B": torch.view_as_real(torch.einsum("np,knd->kpd", basis.conj(), b.to(basis.dtype)).flatten(0, 1)),
            "C": torch.view_as_real(torch.einsum("odkn,np->odkp", c, basis).flatten(-2)),
            "log_dt": log_uniform_dt((size // 2,), self.dt_min, self.dt_max),
            "D": torch.randn(self.num_filters or 1, channels, dtype=torch.float64),
        }
        return {name: value.contiguous() for name, value in values.items()}

    def _computing_dtype(self, u: torch.Tensor) -> torch.dtype:
        return torch.promote_types(torch.promote_types(u.dtype, self.B.dtype), torch.float32)

    def _discretised(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Abar in complex128 and (Abar - 1) / A in the dtype, (P/2,); a few numbers, taken in float64.

        Rounded to float32, an Abar near the unit circle would decay at a different rate.
        """
        eigenvalues = torch.complex(self.A_real.double().clamp(max=LARGEST_REAL), self.A_imag.double())
        z = torch.exp(self.log_dt.double()) * eigenvalues
        growth = torch.expm1(z)  # the difference e^z - 1 loses the digits of a small step
        wide = torch.complex64 if dtype == torch.float32 else torch.complex128
        return growth + 1, (growth / eigenvalues).to(wide)

    def _input_matrix(self, scale: torch.Tensor) -> torch.Tensor:
        """Bbar as a real matrix (P, D), real and imaginary rows side by side; `scale` is (Abar - 1) / A."""
        b = scale.unsqueeze(1) * complex_pairs(self.B, scale.real.dtype)  # (P/2, D)
        return torch.view_as_real(b).transpose(1, 2).flatten(0, 1)

    def _output_matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """2 Re(C ·) as a real matrix (F D, P), of both directions one after the other (F D, 2 P)."""
        c = self.C.to(dtype).unflatten(0, (-1, self.num_filters or 1))
        return (c * twice_conjugate(device=c.device)).permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1)

    def _with_skip(self, y: torch.Tensor, u: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """(..., F D) and u (..., D) → (..., F, D), y + D u."""
        y = y.unflatten(-1, (-1, self.hidden_size))
        return torch.addcmul(y, skip, u.to(y.dtype).unsqueeze(-2))

    def forward_rows(
        self,
        u: torch.Tensor,
        initial_state: MixerState | None,
        rows: Rows,
        *,
        stride: int | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        wanted = OutputPositions.of(stride, positions, u.shape[0], u.shape[1])
        dtype = self._computing_dtype(u)
        if rows.is_step and initial_state is not None and positions is None:
            y, after = self._one_token(u, initial_state, dtype, is_read=stride in (None, 1))
            return self._squeeze(y).to(u.dtype), after
        x = zero_beyond(u, rows.lengths)
        x = x if u.dtype == torch.bfloat16 else x.to(dtype)
        start = None if initial_state is None else self._complex(initial_state, dtype)
        with without_autocast(u.device.type):
            decay, scale = self._discretised(dtype)
            driven = self._complex(_product(x, self._input_matrix(scale), x.dtype), dtype)
            final: torch.Tensor | None = None
            if self.bidirectional:
                h = self._both_ways(decay, driven, rows.seq_idx)
            else:
                h, final = diagonal_scan(decay, driven, rows=rows, initial_state=start)
            h, x = wanted.take(h), wanted.take(x)
            y = _product(torch.view_as_real(h).flatten(-2), self._output_matrix(dtype), x.dtype)
            y = self._with_skip(y, x, self.D.to(dtype))
        state = None if final is None else torch.view_as_real(final).flatten(-2)
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self.clear_kernel_cache()  # as `_cached` does: the parameters may be about to change
            elif state is not None:
                self._token_constants(dtype)  # cached before decoding, which may be compiled
        return self._squeeze(y).to(u.dtype), state

    def _both_ways(self, decay: torch.Tensor, x: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
        """The states (B, L, P) of the scan that looks back and of the one that looks ahead, computed as one batch."""
        documents = None if seq_idx is None else Documents(torch.cat([seq_idx, -seq_idx.flip(1)]))
        back, ahead = diagonal_scan(decay, torch.cat([x, x.flip(1)]), rows=Rows(documents=documents))[0].chunk(2)
        return torch.cat([back, ahead.flip(1)], dim=-1)

    def _complex(self, state: MixerState, dtype: torch.dtype) -> torch.Tensor:
        """(B, P) real and imaginary parts side by side → (B, P/2) complex."""
        return torch.view_as_complex(state.to(dtype).contiguous().unflatten(-1, (-1, 2)))  # type: ignore[union-attr]

    def _one_token(
        self, u: torch.Tensor, state: MixerState, dtype: torch.dtype, is_read: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y (B, 1, F, D) of a step, none of it (B, 0, F, D) where it is not read, and the state after it (B, P)."""
        assert isinstance(state, torch.Tensor)
        decay, matrix, outputs, skip = self._token_constants(dtype)
        with without_autocast(u.device.type):
            driven = (u.to(dtype) @ matrix).squeeze(1)
            next_state = (product_of_pairs(decay, state.to(decay.dtype)) + driven).to(dtype)
            if not is_read:
                return u.new_empty(u.shape[0], 0, self.num_filters or 1, self.hidden_size), next_state
            return self._with_skip(next_state.unsqueeze(1) @ outputs, u, skip), next_state

    def _token_constants(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Abar (P,) float64, real and imaginary parts side by side; Bbar (D, P) and 2 Re C (P, F D) as real matrices,
        D (F, D)."""

        def compute(exact: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            inner = torch.float64 if exact else dtype
            decay, scale = self._discretised(inner)
            matrix, readout = self._input_matrix(scale).T, self._output_matrix(inner).T
            skip = self.D.to(dtype, copy=True)
            pairs = torch.view_as_real(decay).flatten(-2)
            return pairs, matrix.to(dtype).contiguous(), readout.to(dtype).contiguous(), skip

        return self._cached(("token", dtype), compute)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.state_size,),)


def _product(x: torch.Tensor, matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x M^T in float32 or wider. In a bfloat16 model factors and results are rounded to bfloat16, as in every linear
    layer; the states between the two products are not, since rounding errors would add up in them."""
    if dtype == torch.bfloat16:
        return (x.to(dtype) @ matrix.to(dtype).T).to(matrix.dtype)
    return x.to(matrix.dtype) @ matrix.T


def _truncated_normal(*shape: int, variance: float) -> torch.Tensor:
    drawn = torch.empty(shape, dtype=torch.float64)
    torch.nn.init.trunc_normal_(drawn, **truncated_normal(variance))  # None where transformers draws later (ZeRO-3)
    return drawn
