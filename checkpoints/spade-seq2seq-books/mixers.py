# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 384bdc7a77b8a6a3dc9ea26a2726417389dda12977501782639c35561e0f2f43

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .causal_conv import causal_conv_step
from .dispatch import (
    check_lengths, check_output_positions, check_seq_idx, check_tensor, is_transforming, packed_sequences,
    power_of_two, take_outputs, without_autocast, zero_beyond,
)
from .linear_scan import (
    BlockMatrices, ChannelSystem, Transition, block_outputs, block_states, channel_scan, diagonal_scan, has_fused_scan,
    linear_step, long_kernel,
)
from .local_attention import shifted, with_free_slot
from .long_conv import long_conv


# ---- layers/mixers/hippo.py -----------------------------------------------------------------------------------------
# HiPPO-LegS, the matrices that make a linear state remember Legendre coefficients of the past. All in float64.

def hippo_legs(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A (N, N), B (N,), P (N,): A_ij = -sqrt((2i+1)(2j+1)) below the diagonal, -(i+1) on it; A + P P^T is normal."""
    index = torch.arange(size, dtype=torch.float64)
    b = torch.sqrt(2 * index + 1)
    a = -torch.tril(torch.outer(b, b), diagonal=-1) - torch.diag(index + 1)
    return a, b, torch.sqrt(index + 0.5)


def legs_dplr_basis(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lambda (N / 2,) and eigenvectors V (N, N / 2) of A + P P^T of LegS, one of each conjugate pair.

    A + P P^T = -I/2 + S with S skew, so -i S is Hermitian and its eigenbasis is unitary. (A itself must not be
    diagonalised: the condition number of its eigenvectors is 8e10 at N = 16 already.)
    """
    if size < 2 or size % 2:
        raise ValueError(f"state_size must be even and at least 2 (conjugate pairs), got {size}.")
    a, _, p = hippo_legs(size)
    skew = a + torch.outer(p, p) + 0.5 * torch.eye(size, dtype=torch.float64)
    frequencies, basis = torch.linalg.eigh(-1j * skew)  # ascending: the first half is the negative frequencies
    half = slice(size // 2)
    real = torch.full((size // 2,), -0.5, dtype=torch.float64)
    return torch.complex(real, frequencies[half]), basis[:, half]


def legs_dplr(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LegS in the basis where A = diag(Lambda) - P P^*: Lambda, B, P, complex (N / 2,), one of each conjugate pair."""
    eigenvalues, basis = legs_dplr_basis(size)
    _, b, p = hippo_legs(size)
    return eigenvalues, basis.mH @ b.to(basis.dtype), basis.mH @ p.to(basis.dtype)


# ---- layers/offloaded.py --------------------------------------------------------------------------------------------
# Methods other than `forward` that read parameters, on a module whose parameters are kept elsewhere between calls.

Method = TypeVar("Method", bound=Callable[..., Any])


def with_accelerate_hooks(method: Method) -> Method:
    """Make `method` of a module fetch its parameters, wherever they are.

    accelerate (`device_map` with memory for a part of the model, `disk_offload`) leaves parameters on the meta device,
    and FSDP2 leaves a shard of them on each device; both bring them in around `forward` alone. A mixer's `step` is
    called from outside as well: there the same hooks run around it. Within `forward` the parameters are in place, and
    nothing more happens.

    transformers' `force_accelerate_hooks` does not serve: it runs the hooks of named submodules around the `forward`
    of their parent, whether they are needed or not; it leaves the arguments where they are, and FSDP2 to itself.
    """

    @functools.wraps(method)
    def with_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "unshard") and _is_sharded(self):
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(self, method.__name__)  # from now on, FSDP gathers before it comes here
            return getattr(self, method.__name__)(*args, **kwargs)
        hook = getattr(self, "_hf_hook", None)
        if hook is None or not any(parameter.is_meta for parameter in self.parameters(recurse=False)):
            return method(self, *args, **kwargs)
        args, kwargs = hook.pre_forward(self, *args, **kwargs)
        return hook.post_forward(self, method(self, *args, **kwargs))

    return with_hooks  # type: ignore[return-value]


def _is_sharded(module: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


# ---- layers/tables.py -----------------------------------------------------------------------------------------------
# Small tables that follow from sizes alone: made once a device, since a copy from the host is a wait for it.

def table(make: Callable[..., Sequence]) -> Callable[..., torch.Tensor]:
    """`make(*sizes)`, a sequence of numbers, becomes `get(*sizes, device=...)`, the tensor of them.

    The tensor is shared: it must not be written to. To `torch.compile` it is a constant.
    """

    @lru_cache
    def kept(*sizes: int, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False), _disable_current_modes():
            return torch.tensor(make(*sizes), device=device)

    @torch.compiler.assume_constant_result
    def get(*sizes: int, device: torch.device) -> torch.Tensor:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return torch.tensor(make(*sizes), device=device)  # a fake tensor, for this trace alone
        return kept(*sizes, device=device)

    return get


twice_conjugate = table(lambda: (2.0, -2.0))
"""By which real and imaginary part of c are multiplied so that c · s becomes 2 Re(c s) of the parts of s."""


# ---- layers/truncated_normal.py -------------------------------------------------------------------------------------
# The truncated normal distribution of a wanted variance.

KEPT = 0.8796256610342398  # deviation of a standard normal cut at -2 and 2


def truncated_normal(variance: float) -> dict[str, float]:
    """Arguments of `trunc_normal_` for a normal cut at two of its deviations that has this variance once it is cut."""
    std = math.sqrt(variance) / KEPT
    return {"std": std, "a": -2 * std, "b": 2 * std}


# ---- layers/float32_parameters.py -----------------------------------------------------------------------------------
# Tensors that stay float32 when a model is cast in place.

class Float32ParametersMixin(nn.Module):
    """A module some of whose own parameters and buffers stay float32 (or float64) through `.to(bfloat16)`, `.half()`.

    `from_pretrained(dtype=...)` keeps them by the model's `_keep_in_fp32_modules_strict`; a cast in place asks each
    module, and would round them for good.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        protected: set[int] = set()
        for name in self.float32_parameters:
            tensor = self._parameters.get(name)
            tensor = self._buffers.get(name) if tensor is None else tensor
            if tensor is not None:
                protected.update(id(kept) for kept in (tensor, tensor.grad) if kept is not None)

        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            out = fn(tensor)
            if id(tensor) not in protected or out.dtype not in (torch.float16, torch.bfloat16):
                return out
            return torch.empty_like(out, dtype=tensor.dtype) if tensor.is_meta else tensor.to(out.device)

        return super()._apply(keep_precision, recurse)


# ---- layers/mixers/base.py ------------------------------------------------------------------------------------------
# The interface of all long-range mixers, and how their parameters survive casts, meta devices and loading.

State: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


class RowOptions(TypedDict):
    """How `Mixer.mix` reads the rows: options of `Mixer.forward`, checked there."""

    seq_idx: torch.Tensor | None
    lengths: torch.Tensor | None
    return_final_state: bool


class Mixer(Float32ParametersMixin):
    """Base of every long-range mixer: (B, L, D) in, (B, L, D) out (or (B, L, F, D) with `filters=F`).

    `forward(u)` of a whole sequence, `forward` in pieces with the returned state, and `step` token by token compute
    the same. A state is one batch-first real tensor or a tuple of them. A subclass defines `init_parameters`, `mix`
    and `state_shapes`, and says in its class variables what it can do.

    Parameters come from `initial_values()`: drawn or derived in float64, then rounded once to the parameter's dtype.
    Models that are built on the meta device call it again for the tensors that no checkpoint filled. Parameters in
    `float32_parameters` stay float32 (or float64) through `.to(bfloat16)`, `.half()` and a bfloat16 default dtype.

    Args:
        hidden_size: D.
        bidirectional: two-sided, for encoders; such a mixer has no state and no step.
        filters: F filters per channel, y is (B, L, F, D); None: one, y is (B, L, D).
        trainable: "all"; "none" (frozen: a constant filter, gradients reach only the input); some mixers also know
            "output" (what reads the state out still trains).
        learning_rate: of the recurrence's or filter's parameters (`dynamics_parameters`); read by the optimizer helper
            from `optimizer_options`. None leaves the rate to the optimizer, as it is for what reads the state out
            (`output_parameters`). Both are without weight decay.
        device, dtype: of the parameters.
    """

    dynamics_parameters: ClassVar[tuple[str, ...]] = ()
    output_parameters: ClassVar[tuple[str, ...]] = ()
    trainable_choices: ClassVar[tuple[str, ...]] = ("all", "none")
    supports_bidirectional: ClassVar[bool] = True
    # F filters per channel, and outputs at some tokens only (`stride`, `positions`)
    supports_filters: ClassVar[bool] = False
    # option of the constructor -> the configuration's field that it is read from, where the configuration has it
    config_options: ClassVar[dict[str, str]] = {}
    default_state_size: ClassVar[int | None] = None  # of the option `state_size`; None: there is no such option
    conjugate_pairs: ClassVar[bool] = False  # of states, so that `state_size` is even
    discretizations: ClassVar[tuple[str, ...]] = ()  # of a continuous system, the first is the default

    def __init__(
        self,
        hidden_size: int,
        *,
        bidirectional: bool = False,
        filters: int | None = None,
        trainable: str = "all",
        learning_rate: float | None = 1e-3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not isinstance(hidden_size, int) or hidden_size < 1:
            raise ValueError(f"hidden_size must be a positive integer, got {hidden_size!r}.")
        if trainable not in self.trainable_choices:
            choices = ", ".join(self.trainable_choices)
            raise ValueError(f"trainable={trainable!r} must be one of {choices} for {type(self).__name__}.")
        if bidirectional and not self.supports_bidirectional:
            raise ValueError(f"{type(self).__name__} looks back only: bidirectional must be False.")
        if filters is not None and not self.supports_filters:
            raise ValueError(f"filters must be None: {type(self).__name__} has one filter per channel.")
        if filters is not None and filters < 1:
            raise ValueError(f"filters must be None or at least 1, got {filters}.")
        self.hidden_size = hidden_size
        self.bidirectional = bidirectional
        self.filters = filters
        self.trainable = trainable
        self.learning_rate = learning_rate
        self._factory: dict[str, Any] = {"device": device, "dtype": dtype}  # of the parameters

    # -- parameters ---------------------------------------------------------------------------------------------

    def init_parameters(self) -> dict[str, torch.Tensor]:
        """Fresh float64 values of the parameters this class defines itself, by name. Random ones are drawn again."""
        return {}

    def initial_values(self) -> dict[str, torch.Tensor]:
        """`init_parameters()` on the CPU, each value in the dtype of its parameter."""
        with torch.device("cpu"), torch.no_grad():
            values = self.init_parameters()
        return {name: value.to(self._parameter_dtype(name)) for name, value in values.items()}

    def create_parameters(self) -> None:
        """Register the parameters with their initial values; subclasses call it once their sizes are set."""
        where = (
            self._factory["device"] or torch.empty(0).device
        )  # torch 2.6 names another default device inside `with torch.device`
        for name, value in self.initial_values().items():
            self.register_parameter(name, nn.Parameter(value.to(where)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Re-initialise all parameters, in place."""
        for name, value in self.initial_values().items():
            self.get_parameter(name).copy_(value)
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]
        self.clear_kernel_cache()

    def clear_kernel_cache(self) -> None:
        """Drop everything cached about the values of the parameters; called whenever they may have changed."""

    def _parameter_dtype(self, name: str) -> torch.dtype:
        existing = dict(self.named_parameters()).get(name)
        if existing is not None:
            return existing.dtype
        dtype = self._factory["dtype"] or torch.get_default_dtype()
        return torch.promote_types(dtype, torch.float32) if name in self.float32_parameters else dtype

    def _is_frozen(self, name: str) -> bool:
        return self.trainable == "none" or (self.trainable == "output" and name not in self.output_parameters)

    def optimizer_options(self, name: str) -> dict[str, float]:
        """Optimizer options of a parameter, read by `hf_hybrid_ssm.training.optim`; empty for an ordinary one."""
        if name not in self.dynamics_parameters and name not in self.output_parameters:
            return {}
        has_own_rate = name in self.dynamics_parameters and self.learning_rate is not None
        return {"weight_decay": 0.0} | ({"lr": self.learning_rate} if has_own_rate else {})  # type: ignore[dict-item]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Also reached by `setattr`, which is how checkpoints are loaded: what is frozen stays frozen."""
        super().register_parameter(name, param)
        if param is not None and self._is_frozen(name):
            param.requires_grad_(False)

    # -- computing ----------------------------------------------------------------------------------------------

    def forward(
        self,
        u: torch.Tensor,
        *,
        initial_state: State | None = None,
        seq_idx: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        return_final_state: bool = False,
        stride: int | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State | None]:
        """Mix a batch of sequences.

        Args:
            u: (B, L, D).
            initial_state: what an earlier call returned, or `init_state`; of the row's first document.
            seq_idx: (B, L) int, documents of a packed row: nothing passes from one to another.
            lengths: (B,) int, the real tokens at the front of each row. Outputs after them are meaningless but finite,
                and the final state is the one after them.
            return_final_state: also return the state.
            stride: W, outputs at the tokens W - 1, 2 W - 1, ... only: y is (B, L // W, [F,] D). This and `positions`
                are for mixers that take `filters`.
            positions: (B, J) int64, outputs at these tokens only: y is (B, J, [F,] D).

        Returns:
            y in u's dtype and the final state, or None if it was not asked for.
        """
        check_tensor("u", u, (None, None, self.hidden_size), "B, L, D")
        check_seq_idx(seq_idx, u.shape[0], u.shape[1])
        check_lengths(lengths, u.shape[0], u.shape[1])
        name = type(self).__name__
        if self.bidirectional and (initial_state is not None or return_final_state):
            raise ValueError(
                f"A bidirectional {name} has no state: initial_state must be None and return_final_state False."
            )
        selection: dict[str, Any] = {"stride": stride, "positions": positions} if self.supports_filters else {}
        if not selection and (stride is not None or positions is not None):
            raise ValueError(f"{name} gives outputs at all tokens: stride and positions must be None.")
        if initial_state is not None:
            self._check_state(initial_state, u.shape[0])
        rows: RowOptions = {"seq_idx": seq_idx, "lengths": lengths, "return_final_state": return_final_state}
        return self.mix(u, initial_state, **rows, **selection)

    def mix(
        self, u: torch.Tensor, initial_state: State | None, **rows: Unpack[RowOptions]
    ) -> tuple[torch.Tensor, State | None]:
        """What `forward` computes, for arguments that it has checked; with `supports_filters` there are also the
        options `stride` and `positions`."""
        raise NotImplementedError

    def step(self, u_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One token: u_t (B, D) and the state before it -> y_t and the state after it."""
        self._check_step(u_t, state)
        if torch.is_grad_enabled() or is_transforming():
            return self._forward_token(u_t, state)
        copies = tuple(part.clone() for part in state) if isinstance(state, tuple) else state.clone()
        return self.step_(u_t, copies)

    def step_(self, u_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """`step` without gradients, which may compute the next state in place of `state`: what decoding calls. A
        subclass overrides it where one token is cheaper on its own."""
        return self._forward_token(u_t, state)

    def _forward_token(self, u_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        y, after = self(u_t.unsqueeze(1), initial_state=state, return_final_state=True)
        return y[:, 0], after

    def advance_(self, u_t: torch.Tensor, state: State) -> State:
        """The state after the token alone, under the same terms."""
        return self.step_(u_t, state)[1]

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each tensor of a state, without the batch in front."""
        raise NotImplementedError

    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before the first token (zeros), float32 unless `dtype` says otherwise."""
        device = device or next((param.device for param in self.parameters()), None)
        shapes = ((batch, *shape) for shape in self.state_shapes())
        state = tuple(torch.zeros(shape, device=device, dtype=dtype or torch.float32) for shape in shapes)
        return state if len(state) > 1 else state[0]

    def _check_step(self, u_t: torch.Tensor, state: State) -> None:
        if self.bidirectional:
            raise ValueError(f"A bidirectional {type(self).__name__} has no step: its output needs the future.")
        check_tensor("u_t", u_t, (None, self.hidden_size), "B, D")
        self._check_state(state, u_t.shape[0])

    def _check_state(self, state: State, batch: int) -> None:
        shapes = self.state_shapes()
        parts = state if isinstance(state, tuple) else (state,)
        if len(parts) != len(shapes):
            raise ValueError(f"state must be {len(shapes)} tensors for {type(self).__name__}, got {len(parts)}.")
        for index, (part, shape) in enumerate(zip(parts, shapes)):
            name = f"state[{index}]" if len(shapes) > 1 else "state"
            check_tensor(name, part, (batch, *shape), "B, ..., as of state_shapes()")

    def _squeeze(self, y: torch.Tensor) -> torch.Tensor:
        """(..., F, D) → (..., D), where F filters were not asked for."""
        return y if self.filters else y.squeeze(-2)

    def extra_repr(self) -> str:
        parts = [str(self.hidden_size)]
        if self.bidirectional:
            parts.append("bidirectional=True")
        if self.trainable != "all":
            parts.append(f"trainable={self.trainable!r}")
        return ", ".join(parts)


def named_states(state: State | None) -> dict[str, torch.Tensor]:
    """A state as a cache keeps it: its tensors by the names `ssm_0`, `ssm_1`, ...; without a state none."""
    parts = () if state is None else (state,) if isinstance(state, torch.Tensor) else state
    return {f"ssm_{index}": part for index, part in enumerate(parts)}


def mixer_state(states: dict[str, torch.Tensor]) -> State | None:
    """The state among the tensors of a cache, by the names of `named_states`; None if there is none."""
    count = sum(name.startswith("ssm_") for name in states)
    parts = tuple(states[f"ssm_{index}"] for index in range(count))
    return parts if count > 1 else parts[0] if parts else None


class _Frozen(nn.Module):
    """Parameters that do not train, not even after a checkpoint replaced them."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, None if param is None else param.requires_grad_(False))


class FrozenLinear(_Frozen, nn.Linear):
    """`nn.Linear` whose parameters do not train."""


class FrozenLSTM(_Frozen, nn.LSTM):
    """`nn.LSTM` whose parameters do not train."""


# ---- layers/mixers/cached_kernel.py ---------------------------------------------------------------------------------
# Results that depend on parameters alone, computed once while the parameters are constants.

class CachedKernelMixer(Mixer):
    """A mixer that remembers its kernel while the parameters it comes from are constants: frozen, or without autograd.

    What is remembered is computed in float64, is not part of the state dict, and is forgotten when a parameter is
    written, loaded, replaced, moved or cast. Inside `torch.compile` writes cannot be seen; there only frozen
    parameters count as constants, and the ways that weights change outside of it (loading, moving, casting,
    `reset_parameters`) still drop it. Inside a function transform (`torch.func`, forward-mode differentiation)
    no parameter counts as a constant.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._kernel_cache: dict[Any, Any] = {}
        self._versions: list[Any] = []
        super().__init__(*args, **kwargs)

    def _own_parameters(self) -> dict[str, torch.Tensor]:
        """Of this module itself, by name. A replica of `nn.DataParallel` has copies of them instead."""
        params = self._parameters or getattr(self, "_former_parameters", {})
        return {name: param for name, param in params.items() if param is not None}

    def _trains(self, names: tuple[str, ...]) -> bool:
        params = self._own_parameters()
        return any(params[name].requires_grad for name in names if name in params)

    def _cached(self, key: Any, names: tuple[str, ...], compute: Any) -> Any:
        """`compute()`, cached under `key` while the parameters `names` are constants."""
        leave: Any = contextlib.nullcontext()
        trains = (torch.compiler.is_compiling() or torch.is_grad_enabled()) and self._trains(names)
        if trains or is_transforming():
            if not torch.compiler.is_compiling():
                self._kernel_cache.pop(key, None)  # FSDP writes into gathered parameters without a trace
            with self._without_autocast():
                return compute(False)
        if not torch.compiler.is_compiling():
            self._clear_if_changed()
            if torch.is_inference_mode_enabled():  # autograd could not use tensors made there
                leave = torch.inference_mode(False)
        if key not in self._kernel_cache:
            with leave, torch.no_grad(), self._without_autocast():
                self._kernel_cache[key] = compute(True)
        return self._kernel_cache[key]

    def _without_autocast(self) -> contextlib.AbstractContextManager:
        """Powers and kernels keep the precision of their parameters, whatever the model around computes in."""
        return without_autocast(self._device.type)

    def _clear_if_changed(self) -> None:
        """Writes into a parameter leave no other trace than its version; a replaced parameter is another object."""
        seen = [
            (id(param), param.data_ptr(), -1 if param.is_inference() else param._version, param)
            for param in self._own_parameters().values()
        ]
        if [mark[:3] for mark in seen] != [mark[:3] for mark in self._versions]:
            self._kernel_cache = {}
            self._versions = seen  # which keeps the parameters: no other can have the id of one of them

    def clear_kernel_cache(self) -> None:
        self._kernel_cache = {}
        self._versions = []

    # the ways that parameters change, but for writes into them

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.clear_kernel_cache()

    def _apply(self, fn: Any, recurse: bool = True) -> "CachedKernelMixer":
        super()._apply(fn, recurse)
        self.clear_kernel_cache()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.clear_kernel_cache()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel_cache": {}, "_versions": []}

    @property
    def _device(self) -> torch.device:
        return next(iter(self._own_parameters().values())).device

    def _computing_dtype(self, u: torch.Tensor) -> torch.dtype:
        dtypes = (u.dtype, *(param.dtype for param in self._own_parameters().values()))
        return torch.float64 if torch.float64 in dtypes else torch.float32


def fold_token(back: torch.Tensor, ahead: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernels that look back and ahead from the token itself, as `long_conv` takes them: the one ahead starts at the
    next token."""
    return torch.cat([back[..., :1] + ahead[..., :1], back[..., 1:]], dim=-1), ahead[..., 1:]


# ---- layers/mixers/lstm.py ------------------------------------------------------------------------------------------
# `torch.nn.LSTM` with the interface of the long-range mixers, for ablations.

class LSTM(Mixer):
    """One LSTM layer D -> D; bidirectional: two directions of D / 2, side by side.

    Documents and ragged rows run as rows of their own, so nothing passes between them. State: (h, c), (B, D) each.
    Like every recurrence it computes in the precision of its parameters, whatever autocast says.
    """

    def __init__(self, hidden_size: int, **options: Any):
        super().__init__(hidden_size, **options)
        if self.bidirectional and hidden_size % 2:
            raise ValueError(f"hidden_size must be even for a bidirectional LSTM, got {hidden_size}.")
        kind = FrozenLSTM if self.trainable == "none" else nn.LSTM
        width = hidden_size // 2 if self.bidirectional else hidden_size
        self.rnn = kind(hidden_size, width, batch_first=True, bidirectional=self.bidirectional, **self._factory)

    def init_parameters(self) -> dict[str, torch.Tensor]:
        """torch's: uniform between -1 and 1 over the root of the width."""
        bound = self.rnn.hidden_size**-0.5
        return {
            name: (2 * torch.rand(parameter.shape, dtype=torch.float64) - 1) * bound
            for name, parameter in self.named_parameters()
        }

    def mix(
        self, u: torch.Tensor, initial_state: State | None, **rows: Unpack[RowOptions]
    ) -> tuple[torch.Tensor, State | None]:
        lengths, state, documents = rows["lengths"], None, None
        if not self.bidirectional:
            start = self.init_state(u.shape[0], device=u.device) if initial_state is None else initial_state
            state = tuple(part.to(self.rnn.weight_ih_l0.dtype) for part in start)
        if 0 in u.shape[:2]:
            return u, _widened(state) if rows["return_final_state"] and state is not None else None
        x = u.to(self.rnn.weight_ih_l0.dtype)
        if rows["seq_idx"] is not None:
            documents = packed_sequences(rows["seq_idx"], lengths)
            x, lengths = documents.unpack(x), documents.lengths
            state = None if state is None else tuple(documents.unpack_state(part) for part in state)
        with without_autocast(u.device.type):
            y, final = self._run(x, state, lengths)
        if documents is not None:
            y, final = documents.pack(y), tuple(part[documents.last] for part in final)
        return y.to(u.dtype), _widened(final) if rows["return_final_state"] else None

    def _run(
        self, x: torch.Tensor, state: tuple[torch.Tensor, ...] | None, lengths: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Rows of one document each; a row without tokens keeps its state."""
        start = None if state is None else tuple(part.unsqueeze(0) for part in state)
        if lengths is None:
            y, final = self.rnn(x, start)
        else:  # a packed sequence has no empty rows: they read one zero
            sizes = lengths.clamp(min=1).cpu()
            x = zero_beyond(x, lengths)
            packed = nn.utils.rnn.pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
            y, final = self.rnn(packed, start)
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        if state is None:
            return y, ()
        final = tuple(part[0] for part in final)
        if lengths is not None:
            empty = (lengths == 0).unsqueeze(1)
            final = tuple(torch.where(empty, old, new) for old, new in zip(state, final))
        return y, final

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.hidden_size,), (self.hidden_size,)


def _widened(state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """States travel in float32 at least, like those of every mixer."""
    return tuple(part.to(torch.promote_types(part.dtype, torch.float32)) for part in state)


# ---- layers/mixers/state_space.py -----------------------------------------------------------------------------------
# What S4, S4D and EMA share: a linear system per channel, its filter, its block form, its step.

# what state-space models read of a configuration
SSM_FIELDS = {"state_size": "ssm_state_size", "dt_min": "ssm_dt_min", "dt_max": "ssm_dt_max", "skip": "ssm_skip"}

StepConstants: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor, torch.Tensor | None
]
"""Decay minus 1, input vector, low-rank product, output rows, skip."""


class StateSpaceMixer(CachedKernelMixer):
    r"""F real linear systems of N dimensions on each of the D channels, y_t = C s_t + D u_t, s_t = A s_{t-1} + B u_t.

    A subclass gives its discretised matrices (`dynamics`, `output_rows`, `skip_weight`). Rows without
    a state before or after them are convolved with the kernel where no fused scan runs, all others are scanned; both
    compute the same numbers. Constant kernels and block matrices are computed once, in float64 (`CachedKernelMixer`).

    The state is (B, F, D, N), without `filters` (B, D, N).

    Args:
        block_size: tokens per block, a power of two.
        skip: with the D term.
    """

    supports_filters: ClassVar[bool] = True
    state_size: int
    is_diagonal: ClassVar[bool] = True  # A is a diagonal matrix
    # whether the kernel that looks ahead starts at the token itself, or at the next one
    ahead_includes_token: ClassVar[bool] = False
    applies_silu = False  # to the output

    def __init__(self, hidden_size: int, *, block_size: int = 64, skip: bool = True, **options: Any):
        super().__init__(hidden_size, **options)
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {block_size}.")
        self.block_size = block_size
        self.use_skip = skip

    # -- what a subclass defines --------------------------------------------------------------------------------

    def dynamics(self, dtype: torch.dtype, direction: int = 0) -> tuple[Transition, torch.Tensor]:
        """A and B (F, D, N) of the systems that look back (0) or ahead (1)."""
        raise NotImplementedError

    def output_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """C (directions, F, D, N): row 0 looks back, row 1 (bidirectional) looks ahead."""
        raise NotImplementedError

    def skip_weight(self, dtype: torch.dtype) -> torch.Tensor | None:
        """D (F, D), or None."""
        return self.D.to(dtype) if self.use_skip else None  # type: ignore[operator]

    # -- filters and block matrices -----------------------------------------------------------------------------

    def _matrices(
        self, dtype: torch.dtype, direction: int, exact: bool
    ) -> tuple[Transition, torch.Tensor, torch.Tensor]:
        """A, B, C. A diagonal A is taken in float64, a few numbers whose powers must not drift; with `exact`, all."""
        wide = torch.float64 if exact or self.is_diagonal else dtype
        transition, vector = self.dynamics(wide, direction)
        rows = self.output_rows(torch.float64 if exact else dtype)[direction]
        return transition, vector if exact else vector.to(dtype), rows

    @property
    def _all_parameters(self) -> tuple[str, ...]:
        return (*self.dynamics_parameters, *self.output_parameters)

    def system(self, dtype: torch.dtype, direction: int = 0) -> ChannelSystem:
        """The system in `dtype` (float32 or float64); its block matrices are made where they are asked for."""

        def compute(exact: bool) -> ChannelSystem:
            transition, vector, rows = self._matrices(dtype, direction, exact)
            transition = transition if self.is_diagonal else transition.to(dtype)
            return ChannelSystem(transition, vector.to(dtype), rows.to(dtype))

        system = self._cached(("system", dtype, direction), self._all_parameters, compute)
        blocks = (partial(self._blocks, make, dtype, direction, system) for make in (block_states, block_outputs))
        return system._replace(blocks=BlockMatrices(*blocks))

    def _blocks(self, make: Callable[..., Any], dtype: torch.dtype, direction: int, system: ChannelSystem) -> Any:
        def compute(exact: bool) -> Any:
            matrices = self._matrices(dtype, direction, exact) if exact else system[:3]
            return make(*matrices, self.block_size).to(dtype)

        return self._cached((make, dtype, direction), self._all_parameters, compute)

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

        return self._cached(key, self._all_parameters, compute)[..., :length]

    # -- the interface ------------------------------------------------------------------------------------------

    def mix(
        self, u: torch.Tensor, initial_state: State | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = self._computing_dtype(u)
        if self.bidirectional:
            return self._squeeze(self._two_sided(u, dtype, **options)), None
        assert not isinstance(initial_state, tuple)
        state = None if initial_state is None else self._widen(initial_state)
        skip, returns_state = self.skip_weight(dtype), options["return_final_state"]
        asks_for_all = options.get("stride") is None and options.get("positions") is None
        is_whole = asks_for_all and state is None and u.shape[1] > 1
        if is_whole and not (self.is_diagonal and has_fused_scan(u.device.type, dtype)):
            rows = {"lengths": options["lengths"], "seq_idx": options["seq_idx"]}
            y, final = long_conv(u, self.kernel(u.shape[1], dtype), skip=skip, **rows)
            if returns_state:  # no outputs, the state alone
                nothing = u.shape[1] + 1
                _, final = channel_scan(u, self.system(dtype), stride=nothing, return_final_state=True, **rows)
        else:
            y, final = channel_scan(u, self.system(dtype), skip=skip, initial_state=state, **options)
        if returns_state and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Steps will follow, compiled ones perhaps: what they need is there when they are traced.
            self._step_constants(dtype)
        return self._squeeze(y), final if final is None or self.filters else final.squeeze(1)

    def _two_sided(self, u: torch.Tensor, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        back, ahead = (self.kernel(max(u.shape[1], 1), dtype, direction) for direction in (0, 1))
        if self.ahead_includes_token:
            back, ahead = fold_token(back, ahead)
        return long_conv(u, back, future_kernel=ahead, skip=self.skip_weight(dtype), **options)[0]

    @with_accelerate_hooks
    def step_(self, u_t: torch.Tensor, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        y = self._run_step(u_t, state, with_output=True)
        assert isinstance(y, torch.Tensor) and isinstance(state, torch.Tensor)
        return self._squeeze(y), state

    @with_accelerate_hooks
    def advance_(self, u_t: torch.Tensor, state: State) -> State:
        self._run_step(u_t, state, with_output=False)
        return state

    def _run_step(self, u_t: torch.Tensor, state: State, *, with_output: bool) -> torch.Tensor | None:
        self._check_step(u_t, state)
        assert isinstance(state, torch.Tensor)
        change, vector, low_rank, rows, skip = self._step_constants(self._computing_dtype(u_t))
        options: dict[str, Any] = {"low_rank": low_rank, "is_complex": self.conjugate_pairs}
        if with_output:
            options |= {"output_rows": rows, "skip": skip, "silu": self.applies_silu}
        with without_autocast(u_t.device.type):
            return linear_step(u_t, self._widen(state), change, vector, **options)

    def step_system(
        self, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """a, b, and l, r or None, (F, D, N) each, of s_t = a s_{t-1} - l (r · s_{t-1}) + b u_t (see `linear_step`)."""
        transition, vector = self.dynamics(dtype)
        decay = transition.value.flatten(-2) if transition.form == "complex" else transition.value
        return decay, vector, None

    def _step_constants(self, dtype: torch.dtype) -> StepConstants:
        """What one token needs beside the state and itself."""

        def compute(exact: bool) -> StepConstants:
            inner = torch.float64 if exact else dtype
            decay, vector, low_rank = self.step_system(inner)
            ones = torch.ones_like(decay)
            if self.conjugate_pairs:
                ones[..., 1::2] = 0.0  # imaginary parts
            parts = (decay - ones, vector, self.output_rows(inner)[0])
            change, vector, rows = (part.to(dtype).contiguous() for part in parts)
            if low_rank is not None:
                low_rank = low_rank[0].to(dtype).contiguous(), low_rank[1].to(dtype).contiguous()
            skip = self.skip_weight(inner)
            return change, vector, low_rank, rows, None if skip is None else skip.to(dtype).contiguous()

        return self._cached(("step", dtype), self._all_parameters, compute)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        filters = () if self.filters is None else (self.filters,)
        return ((*filters, self.hidden_size, self.state_size),)

    def _widen(self, state: torch.Tensor) -> torch.Tensor:
        """The state as (B, F, D, N)."""
        return state.unsqueeze(1) if self.filters is None else state


def log_uniform_step(shape: tuple[int, ...], smallest: float, largest: float) -> torch.Tensor:
    """log(dt), uniform between the logarithms of the two ends, float64."""
    if not 0 < smallest <= largest:
        raise ValueError(f"dt_min and dt_max must satisfy 0 < dt_min <= dt_max, got {smallest} and {largest}.")
    low, high = torch.log(torch.tensor([smallest, largest], dtype=torch.float64))
    return low + (high - low) * torch.rand(shape, dtype=torch.float64)


def complex_pairs(param: nn.Parameter | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter (..., 2) of real and imaginary parts as complex numbers in the precision of `dtype`."""
    return torch.view_as_complex(param.to(dtype).contiguous())


# ---- layers/mixers/hyena.py -----------------------------------------------------------------------------------------
# Long convolutions with a free filter: the plain implicit one, and Hyena around it (Poli et al., 2023).

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
        skip: with the D term.
    """

    supports_filters: ClassVar[bool] = True
    config_options: ClassVar[dict[str, str]] = {
        "filter_length": "filter_length",
        "filter_emb": "filter_emb_dim",
        "filter_hidden_size": "filter_hidden_size",
        "filter_layers": "filter_inner_layers",
        "filter_freq": "filter_sin_freq",
        "fast_decay": "filter_fast_decay_pct",
        "slow_decay": "filter_slow_decay_pct",
        "decay_target": "filter_decay_target",
        "skip": "ssm_skip",
    }
    # the published filters train at 1e-3 without weight decay
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("ffn_in", "ffn_in_bias", "ffn", "ffn_bias", "freq", "ffn_out")
    output_parameters: ClassVar[tuple[str, ...]] = ("D",)
    float32_parameters: ClassVar[tuple[str, ...]] = (*dynamics_parameters, *output_parameters)

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
        skip: bool = True,
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
        self.filter_length, self.use_skip = filter_length, skip
        self.filter_emb, self.filter_hidden_size, self.filter_layers = filter_emb, filter_hidden_size, filter_layers
        self.filter_freq = filter_freq
        self.decays = (math.log(1 / decay_target) / slow_decay, math.log(1 / decay_target) / fast_decay)
        self.create_parameters()

    @property
    def _outputs(self) -> int:
        return (2 if self.bidirectional else 1) * (self.filters or 1) * self.hidden_size

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
        }
        if self.use_skip:
            values["D"] = torch.randn(self.filters or 1, self.hidden_size, dtype=torch.float64)
        return values

    def kernel(self, length: int, dtype: torch.dtype = torch.float32, direction: int = 0) -> torch.Tensor:
        """h_0 .. h_{length-1} (F, D, length) for length <= filter_length; direction 1 looks ahead (bidirectional)."""
        if not 1 <= length <= self.filter_length:
            raise ValueError(f"length must lie in 1..{self.filter_length} (filter_length), got {length}.")
        kernels = self._cached(
            ("kernel", dtype),
            self.dynamics_parameters,
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
        h = (self.ffn_out.to(dtype) @ x.T).view(-1, self.filters or 1, self.hidden_size, length)
        slowest, fastest = self.decays
        rates = torch.linspace(-slowest, -fastest, self.hidden_size, dtype=dtype, device=k.device)
        return h * torch.exp(torch.outer(rates, t))

    def mix(
        self, u: torch.Tensor, initial_state: State | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = self._computing_dtype(u)
        stateful = initial_state is not None or options["return_final_state"]
        taps = self.filter_length if stateful else max(1, min(self.filter_length, u.shape[1]))
        kernel, ahead = self.kernel(taps, dtype), None
        if self.bidirectional:
            kernel, ahead = fold_token(kernel, self.kernel(taps, dtype, 1))
        skip = self.D.to(dtype) if self.use_skip else None
        y, state = long_conv(u, kernel, future_kernel=ahead, skip=skip, initial_state=initial_state, **options)
        return self._squeeze(y), state

    @with_accelerate_hooks
    def step_(self, u_t: torch.Tensor, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self._append_(u_t, state)
        return self._read(u_t, seen), shifted(seen)

    def advance_(self, u_t: torch.Tensor, state: State) -> State:
        return shifted(self._append_(u_t, state))

    def _append_(self, u_t: torch.Tensor, state: State) -> torch.Tensor:
        """The inputs that the filter reaches (B, Lf, D), this one last; the state moves along its buffer."""
        self._check_step(u_t, state)
        assert isinstance(state, torch.Tensor)
        seen = with_free_slot(state)
        seen[:, -1].copy_(u_t)
        return seen

    def _read(self, u_t: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """y_t of the inputs (B, Lf, D)."""
        dtype = self._computing_dtype(u_t)
        taps = self._step_taps(dtype)
        with without_autocast(u_t.device.type):
            y = torch.linalg.vecdot(seen.to(dtype).unsqueeze(1), taps, dim=2)
        return self._squeeze(y).to(u_t.dtype)

    def _step_taps(self, dtype: torch.dtype) -> torch.Tensor:
        """The filters (F, Lf, D), the token's own tap last, with the skip in it."""

        def compute(exact: bool) -> torch.Tensor:
            kernel = self.kernel(self.filter_length, dtype)
            if self.use_skip:
                kernel = torch.cat([kernel[..., :1] + self.D.to(dtype).unsqueeze(-1), kernel[..., 1:]], -1)
            return kernel.flip(-1).mT.contiguous()

        return self._cached(("step", dtype), (*self.dynamics_parameters, *self.output_parameters), compute)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.filter_length - 1, self.hidden_size),)


HYENA_COMMON_OPTIONS = ("bidirectional", "filters", "trainable", "learning_rate", "device", "dtype")  # of every mixer


class Hyena(Mixer):
    r"""Hyena of order 2: (p_0, p_1, v) = shortconv_3(W_in u), z = p_1 v, y = W_out(p_0 (h * z + D z)).

    The short convolution is depthwise with a bias, causal, or centred when bidirectional; `short_weight[:, k]` is the
    tap of lag k (bidirectional: lags 0, 1, -1). The filter is `ImplicitLongConv`, and `filter_*` its arguments.

    The state is the last two rows of W_in u, (B, 2, 3 D), and the filter's own, (B, filter_length - 1, D).
    """

    config_options: ClassVar[dict[str, str]] = ImplicitLongConv.config_options

    def __init__(self, hidden_size: int, **options: Any):
        common = {name: options.pop(name) for name in HYENA_COMMON_OPTIONS if name in options}
        super().__init__(hidden_size, **common)
        linear = FrozenLinear if self.trainable == "none" else nn.Linear
        self.in_proj = linear(hidden_size, 3 * hidden_size, **self._factory)
        self.out_proj = linear(hidden_size, hidden_size, **self._factory)
        self.filter = ImplicitLongConv(hidden_size, **common, **options)
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        channels = 3 * self.hidden_size
        weight, bias = (2 * torch.rand(channels, n, dtype=torch.float64) - 1 for n in (3, 1))
        return {"short_weight": weight / math.sqrt(3), "short_bias": bias.squeeze(1) / math.sqrt(3)}

    def mix(
        self, u: torch.Tensor, initial_state: State | None, **rows: Unpack[RowOptions]
    ) -> tuple[torch.Tensor, State | None]:
        short, history = (None, None) if initial_state is None else initial_state
        projected = self.in_proj(zero_beyond(u, rows["lengths"]))
        weight, ahead = self.short_weight, None
        if self.bidirectional:
            weight, ahead = weight[:, :2], weight[:, 2:]
        mixed, last = long_conv(projected, weight, future_kernel=ahead, initial_state=short, **rows)
        p0, p1, v = (mixed + self.short_bias).to(u.dtype).chunk(3, dim=-1)
        z, history = self.filter(p1 * v, initial_state=history, **rows)
        return self.out_proj(p0 * z), None if last is None else (last, history)

    @with_accelerate_hooks
    def step_(self, u_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        self._check_step(u_t, state)
        short, history = state
        mixed = causal_conv_step(self.in_proj(u_t), short, self.short_weight.flip(1), self.short_bias)
        p0, p1, v = mixed.to(u_t.dtype).chunk(3, dim=-1)
        z, history = self.filter.step_(p1 * v, history)
        return self.out_proj(p0 * z), (short, history)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (2, 3 * self.hidden_size), *self.filter.state_shapes()


# ---- layers/mixers/s5.py --------------------------------------------------------------------------------------------
# S5: one diagonal state space with many inputs and outputs for all channels together (Smith et al., 2022).

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
        skip: with the D term.
    """

    supports_filters: ClassVar[bool] = True
    config_options: ClassVar[dict[str, str]] = SSM_FIELDS | {"blocks": "s5_blocks"}
    default_state_size: ClassVar[int] = 256
    conjugate_pairs: ClassVar[bool] = True
    discretizations: ClassVar[tuple[str, ...]] = ("zoh",)
    trainable_choices: ClassVar[tuple[str, ...]] = ("all", "output", "none")
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("A_real", "A_imag", "B", "log_dt")
    output_parameters: ClassVar[tuple[str, ...]] = ("C", "D")
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_real", "A_imag", "B", "C", "log_dt", "D")

    def __init__(
        self,
        hidden_size: int,
        *,
        state_size: int = default_state_size,
        blocks: int | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        skip: bool = True,
        **options: Any,
    ):
        super().__init__(hidden_size, **options)
        if blocks is None:
            blocks = next(count for count in (8, 4, 2, 1) if count == 1 or state_size % (2 * count) == 0)
        if blocks < 1 or state_size < 2 or state_size % (2 * blocks):
            raise ValueError(f"state_size must be a multiple of 2 blocks = {2 * blocks}, got {state_size}.")
        self.state_size, self.blocks, self.use_skip = state_size, blocks, skip
        self.dt_min, self.dt_max = dt_min, dt_max
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        size, blocks, channels = self.state_size, self.blocks, self.hidden_size
        eigenvalues, basis = legs_dplr_basis(size // blocks)  # (p,), (2p, p): p pairs in each block
        outputs = (2 if self.bidirectional else 1) * (self.filters or 1)
        b = _truncated_normal(blocks, size // blocks, channels, variance=1 / size)
        c = torch.complex(
            *(_truncated_normal(outputs, channels, blocks, size // blocks, variance=1 / size) for _ in "ri")
        )
        values = {
            "A_real": eigenvalues.real.repeat(blocks),
            "A_imag": eigenvalues.imag.repeat(blocks),
            "B": torch.view_as_real(torch.einsum("np,knd->kpd", basis.conj(), b.to(basis.dtype)).flatten(0, 1)),
            "C": torch.view_as_real(torch.einsum("odkn,np->odkp", c, basis).flatten(-2)),
            "log_dt": log_uniform_step((size // 2,), self.dt_min, self.dt_max),
        }
        if self.use_skip:
            values["D"] = torch.randn(self.filters or 1, channels, dtype=torch.float64)
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
        c = self.C.to(dtype).unflatten(0, (-1, self.filters or 1))
        return (c * twice_conjugate(device=c.device)).permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1)

    def _with_skip(self, y: torch.Tensor, u: torch.Tensor, skip: torch.Tensor | None) -> torch.Tensor:
        """(..., F D) and u (..., D) → (..., F, D), y + D u."""
        y = y.unflatten(-1, (-1, self.hidden_size))
        return y if skip is None else torch.addcmul(y, skip, u.to(y.dtype).unsqueeze(-2))

    def mix(
        self,
        u: torch.Tensor,
        initial_state: State | None,
        *,
        stride: int | None = None,
        positions: torch.Tensor | None = None,
        **rows: Unpack[RowOptions],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        check_output_positions(stride, positions, *u.shape[:2])
        dtype, x = self._computing_dtype(u), zero_beyond(u, rows["lengths"])
        x = x if u.dtype == torch.bfloat16 else x.to(dtype)
        start = None if initial_state is None else self._complex(initial_state, dtype)
        with without_autocast(u.device.type):
            decay, scale = self._discretised(dtype)
            driven = self._complex(_product(x, self._input_matrix(scale), x.dtype), dtype)
            if self.bidirectional:
                h, final = self._both_ways(decay, driven, rows["seq_idx"]), None
            else:
                h, final = diagonal_scan(decay, driven, initial_state=start, **rows)
            h, x = take_outputs(h, stride, positions), take_outputs(x, stride, positions)
            y = _product(torch.view_as_real(h).flatten(-2), self._output_matrix(dtype), x.dtype)
            y = self._with_skip(y, x, self.D.to(dtype) if self.use_skip else None)
        state = None if final is None else torch.view_as_real(final).flatten(-2)
        if state is not None and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._step_constants(dtype)  # steps will follow, compiled ones perhaps
        return self._squeeze(y).to(u.dtype), state

    def _both_ways(self, decay: torch.Tensor, x: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
        """(B, L, P): the states of the scan that looks back, and of the one that looks ahead, as more rows of one."""
        documents = None if seq_idx is None else torch.cat([seq_idx, -seq_idx.flip(1)])
        back, ahead = diagonal_scan(decay, torch.cat([x, x.flip(1)]), seq_idx=documents)[0].chunk(2)
        return torch.cat([back, ahead.flip(1)], dim=-1)

    def _complex(self, state: State, dtype: torch.dtype) -> torch.Tensor:
        """(B, P) real and imaginary parts side by side → (B, P/2) complex."""
        return torch.view_as_complex(state.to(dtype).contiguous().unflatten(-1, (-1, 2)))  # type: ignore[union-attr]

    @with_accelerate_hooks
    def step_(self, u_t: torch.Tensor, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        next_state = self.advance_(u_t, state)
        dtype = self._computing_dtype(u_t)
        *_, rows, skip = self._step_constants(dtype)
        with without_autocast(u_t.device.type):
            y = self._with_skip(next_state @ rows, u_t, skip)
        return self._squeeze(y).to(u_t.dtype), next_state

    @with_accelerate_hooks
    def advance_(self, u_t: torch.Tensor, state: State) -> torch.Tensor:
        self._check_step(u_t, state)
        dtype = self._computing_dtype(u_t)
        decay, matrix, *_ = self._step_constants(dtype)
        with without_autocast(u_t.device.type):
            driven = self._complex(u_t.to(dtype) @ matrix, dtype)
            after = (decay * self._complex(state, dtype) + driven).to(driven.dtype)
            return torch.view_as_real(after).flatten(-2)

    def _step_constants(
        self, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Abar (P/2,) in complex128; Bbar (D, P) and 2 Re C (P, F D) as real matrices, D (F, D) or None."""

        def compute(exact: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
            inner = torch.float64 if exact else dtype
            decay, scale = self._discretised(inner)
            matrix, rows = self._input_matrix(scale).T, self._output_matrix(inner).T
            skip = self.D.to(dtype) if self.use_skip else None
            return decay, matrix.to(dtype).contiguous(), rows.to(dtype).contiguous(), skip

        return self._cached(("step", dtype), (*self.dynamics_parameters, *self.output_parameters), compute)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.state_size,),)


def _product(x: torch.Tensor, matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x M^T as float32 or wider numbers. In a bfloat16 model factors and results are rounded to bfloat16, as in every
    linear layer; the states between the two products are not, since they must not lose what they add up."""
    if dtype == torch.bfloat16:
        return (x.to(dtype) @ matrix.to(dtype).T).to(matrix.dtype)
    return x.to(matrix.dtype) @ matrix.T


def _truncated_normal(*shape: int, variance: float) -> torch.Tensor:
    return torch.nn.init.trunc_normal_(torch.empty(shape, dtype=torch.float64), **truncated_normal(variance))


# ---- layers/mixers/s4d.py -------------------------------------------------------------------------------------------
# S4D: a diagonal complex state space per channel (Gu et al., 2022).

INITS = ("legs", "inv", "lin")


class DiagonalSSM(StateSpaceMixer):
    """The parameters that S4D and S4 have in common: eigenvalues, input, output, step size, skip.

    Only one of each conjugate pair is kept, so n = N / 2 complex numbers per system; `num_dynamics` = S copies of the
    eigenvalues and input vectors are tiled over the F D systems.

        A_log_real, A_imag (S, n)   Lambda = -exp(A_log_real) + i A_imag
        B (S, n, 2)                 C (directions F, D, n, 2)      log_dt (F, D)      D (F, D)
    """

    trainable_choices: ClassVar[tuple[str, ...]] = ("all", "output", "none")
    output_parameters: ClassVar[tuple[str, ...]] = ("C", "D")
    config_options: ClassVar[dict[str, str]] = SSM_FIELDS | {"num_dynamics": "ssm_num_dynamics"}
    default_state_size: ClassVar[int] = 64
    conjugate_pairs: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        *,
        state_size: int = default_state_size,
        num_dynamics: int | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        **options: Any,
    ):
        super().__init__(hidden_size, **options)
        if not isinstance(state_size, int) or state_size < 2 or state_size % 2:
            raise ValueError(f"state_size must be even and at least 2 (conjugate pairs), got {state_size!r}.")
        systems = hidden_size * (self.filters or 1)
        if num_dynamics is not None and (num_dynamics < 1 or systems % num_dynamics):
            raise ValueError(f"num_dynamics must divide the {systems} systems, got {num_dynamics}.")
        self.state_size = state_size
        self.num_dynamics = num_dynamics or systems
        self.dt_min, self.dt_max = dt_min, dt_max

    def _common_parameters(self, eigenvalues: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        filters, channels, pairs = self.filters or 1, self.hidden_size, self.state_size // 2
        directions = 2 if self.bidirectional else 1
        copies = self.num_dynamics
        values = {
            "A_log_real": torch.log(-eigenvalues.real).expand(copies, pairs),
            "A_imag": eigenvalues.imag.expand(copies, pairs),
            "B": torch.view_as_real(b.resolve_conj()).expand(copies, pairs, 2),
            "C": torch.randn(directions * filters, channels, pairs, 2, dtype=torch.float64) * math.sqrt(0.5),
            "log_dt": log_uniform_step((filters, channels), self.dt_min, self.dt_max),
        }
        if self.use_skip:
            values["D"] = torch.randn(filters, channels, dtype=torch.float64)
        return {name: value.contiguous() for name, value in values.items()}

    def _tiled(self, value: torch.Tensor) -> torch.Tensor:
        """(S, n) -> (F, D, n): system f D + c takes copy (f D + c) mod S."""
        filters = self.filters or 1
        copies, pairs = value.shape
        if copies == 1:
            return value.expand(filters * self.hidden_size, pairs).view(filters, self.hidden_size, pairs)
        value = (
            value if copies == filters * self.hidden_size else value.repeat(filters * self.hidden_size // copies, 1)
        )
        return value.view(filters, self.hidden_size, pairs)

    def _eigenvalues(self, dtype: torch.dtype) -> torch.Tensor:
        return self._tiled(torch.complex(-torch.exp(self.A_log_real.to(dtype)), self.A_imag.to(dtype)))  # type: ignore[operator]

    def _dt(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.exp(self.log_dt.to(dtype)).unsqueeze(-1)  # type: ignore[operator]

    def output_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """2 Re(C s) as a row over the real and imaginary parts of s: (2 Re C, -2 Im C)."""
        c = self.C.to(dtype)  # type: ignore[operator]
        rows = c * twice_conjugate(device=c.device)
        return rows.flatten(-2).view(-1, self.filters or 1, self.hidden_size, self.state_size)


class S4D(DiagonalSSM):
    r"""Diagonal S4: K_k = 2 Re sum_n C_n Bbar_n Abar_n^k.

    Discretisation "zoh" (the default; Abar = e^{dt A}, Bbar = (Abar - 1) / A B) or "bilinear". Initialisation "legs"
    (the normal part of HiPPO-LegS, Im B clipped to [-2, 2]), "inv" (A_n = -1/2 + i N / pi (N / (2n + 1) - 1), its
    asymptotic form) or "lin" (A_n = -1/2 + i pi n), both with B = 1.

    Further arguments: `DiagonalSSM` (state_size, num_dynamics, dt_min, dt_max), `StateSpaceMixer` (filters,
    block_size, skip) and `Mixer` (bidirectional, trainable, learning_rate).
    """

    config_options: ClassVar[dict[str, str]] = DiagonalSSM.config_options | {
        "init": "ssm_init",
        "discretization": "ssm_discretization",
    }
    discretizations: ClassVar[tuple[str, ...]] = ("zoh", "bilinear")
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "log_dt")
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "C", "log_dt", "D")

    def __init__(
        self,
        hidden_size: int,
        *,
        init: str = "legs",
        discretization: str | None = None,
        **options: Any,
    ):
        super().__init__(hidden_size, **options)
        if init not in INITS:
            raise ValueError(f"init={init!r} must be one of {', '.join(INITS)}.")
        if discretization not in (None, *self.discretizations):
            raise ValueError(f"discretization={discretization!r} must be one of {', '.join(self.discretizations)}.")
        self.init, self.discretization = init, discretization or self.discretizations[0]
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        if self.init == "legs":
            eigenvalues, b, _ = legs_dplr(self.state_size)
            return self._common_parameters(eigenvalues, torch.complex(b.real, b.imag.clamp(-2.0, 2.0)))
        order, size = torch.arange(self.state_size // 2, dtype=torch.float64), self.state_size
        frequencies = math.pi * order if self.init == "lin" else size / math.pi * (size / (2 * order + 1) - 1)
        eigenvalues = torch.complex(torch.full_like(order, -0.5), frequencies)
        return self._common_parameters(eigenvalues, torch.ones_like(eigenvalues))

    def dynamics(self, dtype: torch.dtype, direction: int = 0) -> tuple[Transition, torch.Tensor]:
        dt, eigenvalues = self._dt(dtype), self._eigenvalues(dtype)
        b = self._tiled(complex_pairs(self.B, dtype))  # type: ignore[arg-type]
        z = dt * eigenvalues
        if self.discretization == "zoh":
            growth = torch.expm1(z)  # the difference e^z - 1 loses the digits of a small step
            decay, input_scale = growth + 1, growth / eigenvalues
        else:
            decay, input_scale = (1 + z / 2) / (1 - z / 2), dt / (1 - z / 2)
        vector = torch.view_as_real(input_scale * b).flatten(-2)
        return Transition(torch.view_as_real(decay), "complex"), vector


# ---- layers/mixers/ema.py -------------------------------------------------------------------------------------------
# The multi-dimensional damped exponential moving average of MEGA (Ma et al., 2022).

class EMA(StateSpaceMixer):
    r"""h_t = (1 - p a) h_{t-1} + p beta u_t, y_t = silu(sum_n gamma_n h_{t,n} / sqrt(n) + omega u_t).

    p = sigmoid(delta), a = sigmoid(alpha), n = `state_size` averages per channel, all real. Parameters `delta`,
    `alpha`, `beta`, `gamma` (directions, D, n), `omega` (D,). The bidirectional form has parameters of its own for the
    direction ahead, and both directions include the token itself.

    Args:
        state_size: n.
        activation: "silu" (as MEGA) or None.
    """

    ahead_includes_token: ClassVar[bool] = True
    supports_filters: ClassVar[bool] = False
    config_options: ClassVar[dict[str, str]] = {"state_size": "ssm_state_size", "activation": "ema_activation"}
    default_state_size: ClassVar[int] = 16
    trainable_choices: ClassVar[tuple[str, ...]] = ("all", "output", "none")
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("delta", "alpha", "beta")
    output_parameters: ClassVar[tuple[str, ...]] = ("gamma", "omega")
    float32_parameters: ClassVar[tuple[str, ...]] = ("delta", "alpha", "beta", "gamma", "omega")

    def __init__(
        self,
        hidden_size: int,
        *,
        state_size: int = default_state_size,
        activation: str | None = "silu",
        **options: Any,
    ):
        super().__init__(hidden_size, **options)
        if state_size < 1:
            raise ValueError(f"state_size must be at least 1, got {state_size}.")
        if activation not in ("silu", None):
            raise ValueError(f"activation={activation!r} must be 'silu' or None.")
        self.state_size, self.activation = state_size, activation
        self.applies_silu = activation is not None  # a step does; `mix` applies it to whole rows
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        shape = (2 if self.bidirectional else 1, self.hidden_size, self.state_size)

        def normal(std: float, *sizes: int) -> torch.Tensor:
            return std * torch.randn(sizes, dtype=torch.float64)

        sign = 1.0 - 2.0 * (torch.arange(self.state_size, dtype=torch.float64) % 2)
        values = {
            "delta": normal(0.2, *shape),
            "alpha": normal(0.2, *shape),
            "beta": sign + normal(0.02, *shape),
            "gamma": normal(1.0, *shape),
        }
        if self.use_skip:
            values["omega"] = normal(1.0, self.hidden_size)
        return values

    def dynamics(self, dtype: torch.dtype, direction: int = 0) -> tuple[Transition, torch.Tensor]:
        p = torch.sigmoid(self.delta[direction].to(dtype)).unsqueeze(0)
        decay = 1 - p * torch.sigmoid(self.alpha[direction].to(dtype))
        return Transition(decay, "real"), p * self.beta[direction].to(dtype)

    def output_rows(self, dtype: torch.dtype) -> torch.Tensor:
        return self.gamma.to(dtype).unsqueeze(1) / math.sqrt(self.state_size)

    def skip_weight(self, dtype: torch.dtype) -> torch.Tensor | None:
        return self.omega.to(dtype).unsqueeze(0) if self.use_skip else None

    def mix(
        self, u: torch.Tensor, initial_state: State | None, **rows: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, state = super().mix(u, initial_state, **rows)
        return (F.silu(y) if self.activation else y), state


# ---- layers/mixers/s4.py --------------------------------------------------------------------------------------------
# S4: HiPPO-LegS as diagonal plus low rank, discretised by the bilinear rule (Gu et al., 2021).

class _BilinearStep(NamedTuple):
    """The constants of one exact step, 5 n complex numbers instead of a dense N x N matrix."""

    resolvent: torch.Tensor  # 1 / (2 / dt - Lambda)
    expanded: torch.Tensor  # 2 / dt + Lambda
    p: torch.Tensor
    b: torch.Tensor
    correction: torch.Tensor  # 1 / (1 + 2 Re sum |P|^2 / (2 / dt - Lambda))


class S4(DiagonalSSM):
    r"""A = Lambda - P P^*, bilinear: Abar = (I - dt/2 A)^{-1} (I + dt/2 A), Bbar = (I - dt/2 A)^{-1} dt B.

    At its start this is HiPPO-LegS itself: A_ij = -sqrt((2i+1)(2j+1)) below the diagonal, -(i+1) on it, B_i =
    sqrt(2i+1), in the basis where A + P P^T is diagonal. It stays stable under training, since Re Lambda < 0 for all
    parameter values. The map is linear over the reals only, and its powers are taken as real N x N matrices.

    Parameters as in `DiagonalSSM`, and P (S, n, 2). Further arguments: `DiagonalSSM` (state_size,
    num_dynamics, dt_min, dt_max), `StateSpaceMixer` (filters, block_size, skip) and `Mixer` (bidirectional, trainable,
    learning_rate).
    """

    is_diagonal: ClassVar[bool] = False
    discretizations: ClassVar[tuple[str, ...]] = ("bilinear",)
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "P", "log_dt")
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "P", "C", "log_dt", "D")

    def __init__(self, hidden_size: int, **options: Any):
        super().__init__(hidden_size, **options)
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        eigenvalues, b, p = legs_dplr(self.state_size)
        values = self._common_parameters(eigenvalues, b)
        values["P"] = torch.view_as_real(p.resolve_conj()).expand(self.num_dynamics, -1, 2).contiguous()
        return values

    def _discretised(self, dtype: torch.dtype) -> _BilinearStep:
        eigenvalues, rate = self._eigenvalues(dtype), 2 / self._dt(dtype)
        p = self._tiled(complex_pairs(self.P, dtype))  # type: ignore[arg-type]
        b = self._tiled(complex_pairs(self.B, dtype))  # type: ignore[arg-type]
        resolvent = 1 / (rate - eigenvalues)
        norm = (p.conj() * p * resolvent).real.sum(-1, keepdim=True)
        return _BilinearStep(resolvent, rate + eigenvalues, p, b, 1 / (1 + 2 * norm))

    def _rank_one(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        r"""Decay, left, right and vector (F, D, n), complex, of h' = decay h - left Re(right · h) + vector u.

        With z = (2 / dt + Lambda) h - P 2 Re(P^* h) + 2 B u, R = 1 / (2 / dt - Lambda) and c the correction, a step is
        h' = R (z - c P 2 Re(P^* R z)). Both products of rank one read the same sum of h, so that
        Abar h = R (2 / dt + Lambda) h - R P Re(k h) with k = 8 c / dt R P^*.
        """
        step, rate = self._discretised(dtype), 2 / self._dt(dtype)
        left, decay = step.resolvent * step.p, step.resolvent * step.expanded
        right = 4 * step.correction * rate * (step.resolvent * step.p.conj())
        vector = 2 * step.resolvent * step.b - left * ((right * step.b).real.sum(-1, keepdim=True) / rate)
        return decay, left, right, vector

    def dynamics(self, dtype: torch.dtype, direction: int = 0) -> tuple[Transition, torch.Tensor]:
        """Abar and Bbar, real and imaginary parts side by side."""
        decay, left, right, vector = self._rank_one(dtype)
        turned = torch.view_as_real(torch.stack([decay, 1j * decay], dim=-1))  # (F, D, n, 2, 2): of 1 and of i
        identity = torch.eye(self.state_size // 2, dtype=dtype, device=self._device)[:, None, :, None]
        diagonal = (turned.unsqueeze(-2) * identity).flatten(-2).flatten(-3, -2)  # (F, D, N, N), row k: of e_k
        read, written = (_side_by_side(part).unsqueeze(dim) for part, dim in ((right.conj(), -1), (left, -2)))
        return Transition(torch.addcmul(diagonal, read, written, value=-1), "dense"), _side_by_side(vector)

    def step_system(
        self, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        decay, left, right, vector = self._rank_one(dtype)
        low_rank = _side_by_side(left), _side_by_side(right.conj())  # Re(k h) of real parts
        return _side_by_side(decay), _side_by_side(vector), low_rank


def _side_by_side(numbers: torch.Tensor) -> torch.Tensor:
    """(..., n) complex → (..., 2 n), real and imaginary parts next to each other."""
    return torch.view_as_real(numbers.resolve_conj()).flatten(-2)


# ---- layers/mixers/registry.py --------------------------------------------------------------------------------------
# Every long-range mixer by its name in a configuration (`ssm_type`), and what it reads of one.

MIXERS: dict[str, type[Mixer]] = {
    "s4": S4,
    "s4d": S4D,
    "s5": S5,
    "hyena": Hyena,
    "unstructured": ImplicitLongConv,
    "ema": EMA,
    "lstm": LSTM,
}
BUILT_IN = frozenset(MIXERS)
REGISTRY_COMMON_OPTIONS = {"trainable": "ssm_trainable", "learning_rate": "ssm_learning_rate"}
_CONFIG_OPTIONS: dict[str, dict[str, str]] = {}  # of mixers registered with options other than their class's


def register_mixer(name: str, mixer: type[Mixer], *, config_options: Mapping[str, str] | None = None) -> None:
    """Let `ssm_type=name` of SPADE and BST mean a mixer of your own.

    Args:
        name: as in a configuration.
        mixer: a subclass of `Mixer`. One of the same module and name takes the place of an earlier one, as when the
            cell of a notebook is run again.
        config_options: option of its constructor → field of the configuration that holds it, a new one perhaps; an
            option whose field a configuration lacks has its default. None: those of the class, `mixer.config_options`.

    Raises:
        TypeError: `mixer` is not a subclass of `Mixer`.
        ValueError: another mixer has the name.
    """
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        raise TypeError(f"mixer must be a subclass of Mixer, got {mixer!r}.")
    known = MIXERS.get(name, mixer)
    if (known.__module__, known.__qualname__) != (mixer.__module__, mixer.__qualname__):
        raise ValueError(
            f"There is a mixer {name!r} already, {known.__module__}.{known.__qualname__}; choose another."
        )
    MIXERS[name] = mixer
    _CONFIG_OPTIONS[name] = dict(mixer.config_options if config_options is None else config_options)


def check_mixer_fields(config: Any) -> type[Mixer]:
    """The class that `config.ssm_type` names.

    Raises:
        ValueError: there is no such mixer, or `config.ssm_state_size` is odd and its states are pairs.
    """
    name, size = config.ssm_type, config.ssm_state_size
    if name not in MIXERS:
        raise ValueError(
            f"ssm_type={name!r} is not one of {', '.join(map(repr, MIXERS))}; one of your own is made known by "
            "hf_hybrid_ssm.register_mixer."
        )
    if size is not None and size % 2 and MIXERS[name].conjugate_pairs:
        raise ValueError(f"ssm_state_size={size} must be even for ssm_type={name!r}: its states are conjugate pairs.")
    return MIXERS[name]


def build_mixer(name: str, hidden_size: int, **options: Any) -> Mixer:
    """The mixer called `name` for `hidden_size` channels.

    Args:
        name: a key of `MIXERS`.
        options: of the mixer's class (`bidirectional`, `trainable`, `state_size`, ...).

    Raises:
        ValueError: there is no such mixer, or it has no such option.
    """
    if name not in MIXERS:
        raise ValueError(f"There is no mixer {name!r}; choose one of {', '.join(sorted(MIXERS))}.")
    try:
        return MIXERS[name](hidden_size, **options)
    except TypeError as error:
        raise ValueError(f"The mixer {name!r} does not take these options: {error}.") from error


def mixer_from_config(config: Any, **options: Any) -> Mixer:
    """The mixer `config.ssm_type` of `config.hidden_size` channels, with what it reads of the configuration; `options`
    (`bidirectional`, `filters`) are the model's."""
    name = config.ssm_type
    fields = REGISTRY_COMMON_OPTIONS | _CONFIG_OPTIONS.get(name, MIXERS[name].config_options)
    read = {option: getattr(config, field) for option, field in fields.items() if hasattr(config, field)}
    return build_mixer(name, config.hidden_size, **read | options)
