"""The interface of all long-range mixers, and how their parameters survive casts, meta devices and loading."""

from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin
from hf_hybrid_ssm.layers.plain_tensors import plain_tensors
from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows

MixerState: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


class Mixer(Float32ParametersMixin):
    """Base of every long-range mixer: (B, L, D) in, (B, L, D) out (or (B, L, F, D) with `num_filters=F`).

    `forward` of a whole sequence, in chunks with the returned state, and token by token compute the same. A state is
    one batch-first real tensor or a tuple of them. A subclass defines `init_parameters`, `forward_rows` and
    `state_shapes`, and declares its capabilities in class variables.

    Parameters come from `initial_values()`: drawn or derived in float64, then rounded once to the parameter's dtype.
    Models that are built on the meta device call it again for the tensors that no checkpoint filled. Parameters in
    `float32_parameters` stay float32 (or float64) through `.to(bfloat16)`, `.half()` and a bfloat16 default dtype.

    Args:
        hidden_size: D.
        bidirectional: two-sided, for encoders; such a mixer has no state.
        num_filters: F filters per channel, y is (B, L, F, D); None: one, y is (B, L, D).
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
    init_reads_values: ClassVar[bool] = True  # `init_parameters` looks at values, and cannot run on the meta device
    discretizations: ClassVar[tuple[str, ...]] = ()  # of a continuous system, the first is the default

    def __init__(
        self,
        hidden_size: int,
        *,
        bidirectional: bool = False,
        num_filters: int | None = None,
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
        if num_filters is not None and not self.supports_filters:
            raise ValueError(f"num_filters must be None: {type(self).__name__} has one filter per channel.")
        if num_filters is not None and num_filters < 1:
            raise ValueError(f"num_filters must be None or at least 1, got {num_filters}.")
        self.hidden_size = hidden_size
        self.bidirectional = bidirectional
        self.num_filters = num_filters
        self.trainable = trainable
        self.learning_rate = learning_rate
        self._factory: dict[str, Any] = {"device": device, "dtype": dtype}  # of the parameters

    # -- parameters ---------------------------------------------------------------------------------------------

    def init_parameters(self) -> dict[str, torch.Tensor]:
        """Fresh float64 values of the parameters this class defines itself, by name. Random ones are drawn again."""
        return {}

    def initial_values(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """`init_parameters()` on the CPU (or the meta device), each value in the dtype of its parameter."""
        with plain_tensors(), torch.device(device), torch.no_grad():
            values = self.init_parameters()
        return {name: value.to(self._parameter_dtype(name)) for name, value in values.items()}

    def create_parameters(self) -> None:
        """Register the parameters with their initial values; subclasses call it once their sizes are set."""
        where = (
            self._factory["device"] or torch.empty(0).device
        )  # torch 2.6 names another default device inside `with torch.device`
        # shapes alone are wanted there, and the values of large ones would need their memory and their time
        is_meta = torch.device(where).type == "meta" and not self.init_reads_values
        for name, value in self.initial_values("meta" if is_meta else "cpu").items():
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
        rate = self.learning_rate if name in self.dynamics_parameters else None
        return {"weight_decay": 0.0} if rate is None else {"weight_decay": 0.0, "lr": rate}

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
        rows: Rows = PLAIN_ROWS,
        initial_state: MixerState | None = None,
        stride: int | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MixerState | None]:
        """Mix a batch of sequences.

        Args:
            u: (B, L, D).
            rows: how the sequences are read.
            initial_state: what an earlier call returned, or `init_state`; of the sequence's first document.
            stride: W, outputs at the tokens W - 1, 2 W - 1, ... only: y is (B, L // W, [F,] D). This and `positions`
                are for mixers that take `num_filters`.
            positions: (B, J) int64, outputs at these tokens only: y is (B, J, [F,] D).

        Returns:
            y in u's dtype and the final state, or None if it was not asked for.
        """
        check_tensor("u", u, (None, None, self.hidden_size), "B, L, D")
        checked_rows(rows, u.shape[0], u.shape[1])
        name = type(self).__name__
        if self.bidirectional and (initial_state is not None or rows.return_final_state):
            raise ValueError(
                f"A bidirectional {name} has no state: initial_state must be None and rows.return_final_state False."
            )
        selection: dict[str, Any] = {"stride": stride, "positions": positions} if self.supports_filters else {}
        if not selection and (stride is not None or positions is not None):
            raise ValueError(f"{name} gives outputs at all tokens: stride and positions must be None.")
        if initial_state is not None:
            self._check_state(initial_state, u.shape[0])
        return self.forward_rows(u, initial_state, rows, **selection)

    def forward_rows(
        self, u: torch.Tensor, initial_state: MixerState | None, rows: Rows
    ) -> tuple[torch.Tensor, MixerState | None]:
        """What `forward` computes, for arguments that it has checked; with `supports_filters` there are also the
        options `stride` and `positions`.

        Where `rows.is_step` and there is a state, no gradient is wanted, and with `rows.overwrites_states` the next
        state may be computed in place of `initial_state`.
        """
        raise NotImplementedError

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each tensor of a state, without the batch in front."""
        raise NotImplementedError

    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MixerState:
        """The state before the first token (zeros), float32 unless `dtype` says otherwise."""
        device = device or next((param.device for param in self.parameters()), None)
        shapes = ((batch, *shape) for shape in self.state_shapes())
        state = tuple(torch.zeros(shape, device=device, dtype=dtype or torch.float32) for shape in shapes)
        return state if len(state) > 1 else state[0]

    def _check_state(self, state: MixerState, batch: int) -> None:
        shapes = self.state_shapes()
        parts = state if isinstance(state, tuple) else (state,)
        if len(parts) != len(shapes):
            raise ValueError(f"state must be {len(shapes)} tensors for {type(self).__name__}, got {len(parts)}.")
        for index, (part, shape) in enumerate(zip(parts, shapes)):
            name = f"state[{index}]" if len(shapes) > 1 else "state"
            check_tensor(name, part, (batch, *shape), "B, ..., as of state_shapes()")

    def _squeeze(self, y: torch.Tensor) -> torch.Tensor:
        """(..., F, D) → (..., D), where F filters were not asked for."""
        return y if self.num_filters else y.squeeze(-2)

    def extra_repr(self) -> str:
        parts = [str(self.hidden_size)]
        if self.bidirectional:
            parts.append("bidirectional=True")
        if self.trainable != "all":
            parts.append(f"trainable={self.trainable!r}")
        return ", ".join(parts)


def named_states(state: MixerState | None) -> dict[str, torch.Tensor]:
    """A state as a cache keeps it: its tensors by the names `ssm_0`, `ssm_1`, ...; without a state none."""
    parts = () if state is None else (state,) if isinstance(state, torch.Tensor) else state
    return {f"ssm_{index}": part for index, part in enumerate(parts)}


def mixer_state(states: dict[str, torch.Tensor]) -> MixerState | None:
    """The state among the tensors of a cache, by the names of `named_states`; None if there is none."""
    count = sum(name.startswith("ssm_") for name in states)
    parts = tuple(states[f"ssm_{index}"] for index in range(count))
    return parts if count > 1 else parts[0] if parts else None


class FrozenMixin(nn.Module):
    """Parameters that do not train, not even after a checkpoint replaced them."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param.requires_grad_(False)
        super().register_parameter(name, param)
