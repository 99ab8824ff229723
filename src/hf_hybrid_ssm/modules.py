"""The families' layers as modules with plain arguments, for models of your own.

    from hf_hybrid_ssm.layers import Longhorn

    layer = Longhorn(512, state_size=16)
    y = layer(x)                                                # (B, L, 512), x likewise
    y, state = layer(x, return_state=True)                      # to go on from
    z, state = layer(next_x, state, return_state=True)          # any number of tokens, one too

Each is the class that the models are made of: its weights have the same names and initial values, and recurrence
parameters stay float32 through `.to(torch.bfloat16)`.
"""

from collections.abc import Callable
from typing import Any

import torch

from hf_hybrid_ssm.layers.mixers import ema, hyena, lstm, s4, s4d, s5
from hf_hybrid_ssm.layers.mixers.base import Mixer, mixer_state, named_states
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.modeling_bst import BstBlock, BstModel
from hf_hybrid_ssm.models.lmu_isa.modeling_lmu_isa import ImplicitAttention
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornMixer, LonghornModel
from hf_hybrid_ssm.models.packing import PackedRows, States, packed_rows
from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.rows import Documents


class Layer(torch.nn.Module):
    """What all of them share; a subclass says how it reads rows.

    `layer(x, state=None, *, seq_idx=None, return_state=False)`:

    Args:
        x: (B, L, D).
        state: what an earlier call returned; it may be overwritten where no gradient is wanted. None: x begins.
        seq_idx: (B, L) integers that never decrease, the document of each token: none sees another.
        return_state: also return the state after the last token, a dictionary of tensors with the batch first.

    Returns:
        (B, L, D) in x's dtype, or that and the state.
    """

    def _forward(
        self,
        x: torch.Tensor,
        state: States | None = None,
        *,
        seq_idx: torch.Tensor | None = None,
        return_state: bool = False,
    ) -> Any:
        check_tensor("x", x, (None, None, None), "B, L, D")
        documents = None if seq_idx is None else Documents.of(seq_idx)
        rows = packed_rows(
            length=x.shape[1], past=0 if state is None else 1, documents=documents, return_final_state=return_state
        )
        y, after = self._read(x, state or {}, rows)
        return (y, after) if return_state else y

    forward: Callable[..., Any] = _forward  # as of `nn.Module`: the classes beneath have others

    def _read(self, x: torch.Tensor, state: States, rows: PackedRows) -> tuple[torch.Tensor, States]:
        raise NotImplementedError


class Longhorn(Layer, LonghornMixer):
    """The block of Longhorn (arXiv 2407.14207), without norm and residual connection.

    Args:
        d_model: D.
        fields: of `LonghornConfig`: `state_size`, `expand`, `conv_kernel`, `time_step_rank`, `use_bias`,
            `use_conv_bias`.
    """

    def __init__(self, d_model: int, **fields: Any):
        config = LonghornConfig(vocab_size=1, hidden_size=d_model, num_hidden_layers=1, **_NO_TOKENS | fields)
        LonghornMixer.__init__(self, config, 0)
        block: Any = LonghornModel(config).layers[0]
        self.load_state_dict(block.mixer.state_dict())

    def _read(self, x: torch.Tensor, state: States, rows: PackedRows) -> tuple[torch.Tensor, States]:
        return self.forward_rows(x, past=state, rows=rows)


class Lmu(Layer, ImplicitAttention):
    """Implicit self-attention over a Legendre memory (arXiv 2110.02402, equations 8 to 11) of each of any D channels.

    Args:
        order: q, coefficients of the memory.
        reduced_order: q', those that attend to each other.
        theta: window of the memory, in tokens.
        options: of `ImplicitAttention`; `activation` is GELU by default.
    """

    def __init__(self, order: int, reduced_order: int, theta: float, **options: Any):
        ImplicitAttention.__init__(
            self, order, reduced_order, theta, **{"activation": torch.nn.functional.gelu} | options
        )

    def _read(self, x: torch.Tensor, state: States, rows: PackedRows) -> tuple[torch.Tensor, States]:
        return ImplicitAttention.forward(self, x, state, rows)


class BlockState(Layer, BstBlock):
    """A layer of the Block-State Transformer (arXiv 2306.09539), whole: norms, attention to a window and to context
    states, feed-forward, residual connections.

    Args:
        d_model: D.
        fields: of `BstConfig`: `num_attention_heads`, `head_dim`, `intermediate_size`, `sliding_window`,
            `context_variant`, `num_context_states`, `ssm_type`, `ssm_state_size`, ...
    """

    def __init__(self, d_model: int, **fields: Any):
        known = {"vocab_size": 1, "hidden_size": d_model, "num_hidden_layers": 1, "ssm_layers": [0]}
        config = BstConfig(**known | _NO_TOKENS | fields)
        BstBlock.__init__(self, config, 0)
        self.load_state_dict(BstModel(config).layers[0].state_dict())

    def _read(self, x: torch.Tensor, state: States, rows: PackedRows) -> tuple[torch.Tensor, States]:
        attended, after = self.forward_rows(x, past=state, rows=rows)
        x = x + attended
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), after


class _OfMixer(Layer):
    """A state-space model of `hf_hybrid_ssm.layers.mixers`, with the arguments of its class."""

    def _read(self, x: torch.Tensor, state: States, rows: PackedRows) -> tuple[torch.Tensor, States]:
        y, after = Mixer.forward(self, x, rows=rows, initial_state=mixer_state(state))  # type: ignore[arg-type]
        return y, named_states(after)


class S4(_OfMixer, s4.S4):
    __doc__ = s4.S4.__doc__


class S4D(_OfMixer, s4d.S4D):
    __doc__ = s4d.S4D.__doc__


class S5(_OfMixer, s5.S5):
    __doc__ = s5.S5.__doc__


class Hyena(_OfMixer, hyena.Hyena):
    __doc__ = hyena.Hyena.__doc__


class EMA(_OfMixer, ema.EMA):
    __doc__ = ema.EMA.__doc__


class LSTM(_OfMixer, lstm.LSTM):
    __doc__ = lstm.LSTM.__doc__


_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
