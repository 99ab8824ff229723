"""What S4, S4D and EMA share: a linear system per channel, its filter, its block form, its step for one token."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from hf_hybrid_ssm.layers.mixers.base import MixerState
from hf_hybrid_ssm.layers.mixers.cached_kernel import CachedKernelMixer, fold_token
from hf_hybrid_ssm.ops.core.blocks import power_of_two
from hf_hybrid_ssm.ops.core.constants import constant
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.linear_scan import (
    BlockMatrices,
    ChannelSystem,
    StepInputs,
    Transition,
    block_outputs,
    block_states,
    has_fused_scan,
    long_kernel,
    lti_scan,
    lti_token,
)
from hf_hybrid_ssm.ops.long_conv import long_conv

# what state-space models read of a configuration
SSM_FIELDS = {"state_size": "ssm_state_size", "dt_min": "ssm_dt_min", "dt_max": "ssm_dt_max"}


class StateSpaceMixer(CachedKernelMixer):
    r"""F real linear systems of N dimensions on each of the D channels, y_t = C s_t + D u_t, s_t = A s_{t-1} + B u_t.

    A subclass gives its discretised matrices (`dynamics`, `output_rows`, `skip_weight`). Rows without
    a state before or after them are convolved with the kernel where no fused scan runs, all others are scanned; both
    compute the same numbers. Constant kernels and block matrices are computed once, in float64 (`CachedKernelMixer`).

    The state is (B, F, D, N), without `num_filters` (B, D, N).

    Args:
        block_size: tokens per block, a power of two.
    """

    supports_filters: ClassVar[bool] = True
    state_size: int
    D: nn.Parameter  # of those whose `skip_weight` it is
    is_diagonal: ClassVar[bool] = True  # A is a diagonal matrix
    # whether the kernel that looks ahead starts at the token itself, or at the next one
    ahead_includes_token: ClassVar[bool] = False
    applies_silu: ClassVar[bool] = False  # to the output

    def __init__(self, hidden_size: int, *, block_size: int = 64, **options: Any):
        super().__init__(hidden_size, **options)
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {block_size}.")
        self.block_size = block_size

    # -- what a subclass defines --------------------------------------------------------------------------------

    def dynamics(self, dtype: torch.dtype, direction: int = 0) -> tuple[Transition, torch.Tensor]:
        """A and B (F, D, N) of the systems that look back (0) or ahead (1)."""
        raise NotImplementedError

    def output_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """C (directions, F, D, N): row 0 looks back, row 1 (bidirectional) looks ahead."""
        raise NotImplementedError

    def skip_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """D (F, D)."""
        return self.D.to(dtype)

    # -- filters and block matrices -----------------------------------------------------------------------------

    def _matrices(
        self, dtype: torch.dtype, direction: int, exact: bool
    ) -> tuple[Transition, torch.Tensor, torch.Tensor]:
        """A, B, C. A diagonal A is taken in float64, a few numbers whose powers must not drift; with `exact`, all."""
        wide = torch.float64 if exact or self.is_diagonal else dtype
        transition, vector = self.dynamics(wide, direction)
        readout = self.output_rows(torch.float64 if exact else dtype)[direction]
        return transition, vector if exact else vector.to(dtype), readout

    def system(self, dtype: torch.dtype, direction: int = 0) -> ChannelSystem:
        """The system in `dtype` (float32 or float64); its block matrices are made where they are asked for."""

        def compute(exact: bool) -> ChannelSystem:
            transition, vector, readout = self._matrices(dtype, direction, exact)
            transition = transition if self.is_diagonal else transition.to(dtype)
            return ChannelSystem(transition, vector.to(dtype), readout.to(dtype))

        system = self._cached(("system", dtype, direction), compute)
        blocks = (partial(self._blocks, make, dtype, direction, system) for make in (block_states, block_outputs))
        return system._replace(blocks=BlockMatrices(*blocks))

    def _blocks(self, make: Callable[..., Any], dtype: torch.dtype, direction: int, system: ChannelSystem) -> Any:
        def compute(exact: bool) -> Any:
            matrices = self._matrices(dtype, direction, exact) if exact else system[:3]
            return make(*matrices, self.block_size).to(dtype)

        return self._cached((make, dtype, direction), compute)

    def kernel(self, length: int, dtype: torch.dtype = torch.float32, direction: int = 0) -> torch.Tensor:
        """K_0 .. K_{length-1} (F, D, length), K_k = C A^k B, of the filter that looks back (0) or ahead (1).

        A constant kernel is cached for the greatest length so far, rounded up to a power of two: shorter ones are its
        beginning.
        """
        key = ("kernel", dtype, direction)
        known = self._kernel_cache.get(key)
        if known is not None and known.shape[-1] < length:
            del self._kernel_cache[key]

        def compute(exact: bool) -> torch.Tensor:
            taps = power_of_two(length) if exact else length
            return long_kernel(*self._matrices(dtype, direction, exact), taps).to(dtype)

        return self._cached(key, compute)[..., :length]

    # -- the interface ------------------------------------------------------------------------------------------

    def forward_rows(
        self,
        u: torch.Tensor,
        initial_state: MixerState | None,
        rows: Rows,
        *,
        stride: int | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = self._computing_dtype(u)
        if self.bidirectional:
            y = self._two_sided(u, dtype, rows, stride=stride, positions=positions)
            return self._squeeze(F.silu(y) if self.applies_silu else y), None
        assert not isinstance(initial_state, tuple)
        if rows.is_step and initial_state is not None and positions is None:
            y, after = self._one_token(u, initial_state, rows, dtype, is_read=stride in (None, 1))
            return self._squeeze(y), after
        state = None if initial_state is None else self._widen(initial_state)
        skip = self.skip_weight(dtype)
        asks_for_all = stride is None and positions is None
        is_whole = asks_for_all and state is None and u.shape[1] > 1
        if is_whole and not (self.is_diagonal and has_fused_scan(u.device.type, dtype)):
            without_state = Rows(padding=rows.padding, documents=rows.documents)
            y, final = long_conv(u, self.kernel(u.shape[1], dtype), skip=skip, rows=without_state)
            if rows.return_final_state:  # no outputs, the state alone
                _, final = lti_scan(u, self.system(dtype), rows=rows, stride=u.shape[1] + 1)
        else:
            y, final = lti_scan(
                u, self.system(dtype), skip=skip, rows=rows, initial_state=state, stride=stride, positions=positions
            )
        if rows.return_final_state and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # cached before decoding, which may be traced by a compiler
            self._token_constants(dtype)
        y = F.silu(y) if self.applies_silu else y
        return self._squeeze(y), final if final is None or self.num_filters else final.squeeze(1)

    def _two_sided(self, u: torch.Tensor, dtype: torch.dtype, rows: Rows, **selection: Any) -> torch.Tensor:
        back, ahead = (self.kernel(max(u.shape[1], 1), dtype, direction) for direction in (0, 1))
        if self.ahead_includes_token:
            back, ahead = fold_token(back, ahead)
        return long_conv(u, back, future_kernel=ahead, skip=self.skip_weight(dtype), rows=rows, **selection)[0]

    def _one_token(
        self, u: torch.Tensor, state: torch.Tensor, rows: Rows, dtype: torch.dtype, is_read: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y (B, 1, F, D) of a step, none of it (B, 0, F, D) where it is not read, and the state after it."""
        state = state if rows.overwrites_states else state.clone()
        inputs = StepInputs(u, self._widen(state), *self._token_constants(dtype))
        inputs = inputs if is_read else inputs._replace(output_rows=None, skip=None)
        with without_autocast(u.device.type):
            y = lti_token(inputs)
        return u.new_empty(u.shape[0], 0, *inputs.state.shape[1:3]) if y is None else y, state

    def token_system(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
        """a and b, and l and r or None, (F, D, N) each, of s_t = a s_{t-1} - l (r · s_{t-1}) + b u_t."""
        transition, vector = self.dynamics(dtype)
        decay = transition.value.flatten(-2) if transition.form == "complex" else transition.value
        return decay, vector, None, None

    def _token_constants(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Those of `StepInputs` that follow the state."""

        def compute(exact: bool) -> tuple[Any, ...]:
            inner = torch.float64 if exact else dtype
            decay, *others = self.token_system(inner)
            ones = torch.ones_like(decay)
            if self.conjugate_pairs:
                ones[..., 1::2] = 0.0  # imaginary parts
            parts = (decay - ones, *others, self.output_rows(inner)[0])
            constants = (None if part is None else part.to(dtype).contiguous() for part in parts)
            # a copy: torch swaps the parameter (`torch.utils.swap_tensors`) only if there is no other reference
            skip = self.skip_weight(inner).to(dtype, copy=True).contiguous()
            return *constants, skip, self.conjugate_pairs, self.applies_silu

        return self._cached(("token", dtype), compute)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        leading = () if self.num_filters is None else (self.num_filters,)
        return ((*leading, self.hidden_size, self.state_size),)

    def _widen(self, state: torch.Tensor) -> torch.Tensor:
        """The state as (B, F, D, N)."""
        return state.unsqueeze(1) if self.num_filters is None else state


def log_uniform_dt(shape: tuple[int, ...], smallest: float, largest: float) -> torch.Tensor:
    """log(dt), uniform between the logarithms of the two ends, float64."""
    if not 0 < smallest <= largest:
        raise ValueError(f"dt_min and dt_max must satisfy 0 < dt_min <= dt_max, got {smallest} and {largest}.")
    low, high = torch.log(torch.tensor([smallest, largest], dtype=torch.float64))
    return low + (high - low) * torch.rand(shape, dtype=torch.float64)


def complex_pairs(param: nn.Parameter | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter (..., 2) of real and imaginary parts as complex numbers in the precision of `dtype`."""
    return torch.view_as_complex(param.to(dtype).contiguous())


@constant
def twice_conjugate() -> torch.Tensor:
    """(2, -2): the factors of the real and imaginary parts of c, whose products with those of s sum to 2 Re(c s)."""
    return torch.tensor((2.0, -2.0))
