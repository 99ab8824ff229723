"""What the heads of all families share: one forward, over a base model.

A head is placed before the pretrained class of its family, and says what it adds to the base model (`_build_head`),
and its logits and loss. Those that classify are in `classifiers.py`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import MaskedLMOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from hf_hybrid_ssm.models.generation import HybridGenerationMixin
from hf_hybrid_ssm.models.inputs import check_labels
from hf_hybrid_ssm.models.outputs import CACHE, CausalLMOutputWithCache, ShiftedLabelsMixin, by_both_cache_names
from hf_hybrid_ssm.ops.linear_cross_entropy import linear_cross_entropy

INPUTS = ("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache", "seq_idx")
"""Of every head's base model, beside what transformers gives to any forward."""
Logits = Any
"""A tensor, or those of the start and of the end of a span; None where a fused loss never held them."""
Predicted = tuple[Logits, torch.Tensor | None]
"""Logits and, where there are targets, the loss."""


class Head:
    """The forward of all heads."""

    config: Any
    training: bool
    post_init: Callable[[], None]
    loss_function: Callable[..., torch.Tensor]
    base_model_class: Callable[[Any], nn.Module]
    output_class: ClassVar[type]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.base_model_class(config)
        self._build_head(config)
        self.post_init()

    def _build_head(self, config: Any) -> None:
        raise NotImplementedError

    def _read(self, hidden_states: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """What the head reads of (B, L, D)."""
        return hidden_states

    def _logits(self, hidden_states: torch.Tensor) -> Logits:
        raise NotImplementedError

    def _loss(self, logits: Logits, targets: Any, **options: Any) -> torch.Tensor:
        return self.loss_function(logits=logits, labels=targets, config=self.config, **options)

    def _predict(self, hidden_states: torch.Tensor, targets: Any, **options: Any) -> Predicted:
        """Logits and, where there are targets, the loss."""
        logits = self._logits(hidden_states)
        return logits, None if targets is None else self._loss(logits, targets, **options)

    def _output(self, logits: Logits, **fields: Any) -> Any:
        return self.output_class(logits=logits, **fields)

    @can_return_tuple
    @by_both_cache_names
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache=None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.IntTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Any:
        r"""
        labels (`torch.Tensor`, *optional*):
            The class of each row of shape `(batch_size,)` (a value with `num_labels == 1`), or the class or the masked
            token at each position of shape `(batch_size, sequence_length)`, -100 to ignore it.
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        """
        inputs = (input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, seq_idx)
        return self._forward(dict(zip(INPUTS, inputs)), labels, {}, kwargs)

    def _forward(self, inputs: dict[str, Any], targets: Any, options: dict[str, Any], kwargs: Any) -> Any:
        """
        Args:
            inputs: of the base model.
            options: of the head alone.
            kwargs: of both.
        """
        outputs = self.model(**inputs, **kwargs)
        logits, loss = self._predict(self._read(outputs.last_hidden_state, inputs), targets, **options, **kwargs)
        fields = {"loss": loss, "hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        if hasattr(self.output_class, CACHE):
            fields[CACHE] = getattr(outputs, CACHE)
        return self._output(logits, **fields)


class LMHead(Head):
    """A prediction of tokens."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: dict[str, str] | None = {"lm_head": "colwise_gather_output"}

    def _build_head(self, config: Any) -> None:
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def _pre_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What a family does to (B, L, D) between the last norm and the head; nothing here."""
        return hidden_states

    def _uses_fused_loss(self) -> bool:
        """Whether the loss is computed from hidden states and the head's weight. A head that is wrapped (LoRA,
        quantization) or sharded (tensor parallelism) is called as a module instead."""
        is_plain = type(self.lm_head) is nn.Linear and type(self.lm_head.weight) is nn.Parameter
        return self.training and self.config.use_linear_cross_entropy and is_plain

    def _predict(
        self,
        hidden_states: torch.Tensor,
        targets: torch.Tensor | None,
        *,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Predicted:
        if targets is not None:
            keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
            shape = hidden_states.shape[:2] if keeps_all else None
            check_labels(targets, self.config.vocab_size, shape, kwargs.get("ignore_index", -100))
            targets = targets.long()
        hidden_states = self._pre_head(slice_logits_to_keep(hidden_states, logits_to_keep))
        if targets is not None and self._uses_fused_loss():
            return None, self._fused_loss(hidden_states, targets, **kwargs)
        logits = self.lm_head(hidden_states)
        if targets is None:
            return logits, None
        sizes = {"vocab_size": self.config.vocab_size}
        return logits, self.loss_function(logits=logits, labels=targets.contiguous(), **sizes, **kwargs)

    def _targets(self, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """(B, L) labels → the token that belongs at each position."""
        return labels

    def _fused_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        *,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Of (B, L, D), the input of the head: the mean over the targets, or their sum divided by `num_items_in_batch`
        (targets over all accumulation steps), as transformers' losses.

        A head with a `loss` of its own (an adaptive softmax) computes the sum itself.
        """
        head: Any = self.lm_head
        targets = self._targets(labels, ignore_index=ignore_index, **kwargs).to(hidden_states.device)
        if isinstance(head, nn.Linear):
            return linear_cross_entropy(
                hidden_states,
                head.weight,
                targets,
                bias=head.bias,
                ignore_index=ignore_index,
                num_items=num_items_in_batch,
                reduction="mean" if num_items_in_batch is None else "sum",
            )
        count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return head.loss(hidden_states.flatten(0, 1), targets.flatten(), ignore_index) / count


class CausalLMHead(ShiftedLabelsMixin, HybridGenerationMixin, LMHead):
    """Next-token prediction."""

    output_class = CausalLMOutputWithCache

    @can_return_tuple
    @by_both_cache_names
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache=None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.IntTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Any:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Token ids to predict, equal to `input_ids` (they are shifted inside); -100 is ignored.
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        """
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep} must be 0 (all) or the number of last tokens.")
        inputs = (input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, seq_idx)
        return self._forward(dict(zip(INPUTS, inputs)), labels, {"logits_to_keep": logits_to_keep}, kwargs)

    def _targets(
        self, labels: torch.Tensor, shift_labels: torch.Tensor | None = None, ignore_index: int = -100, **kwargs: Any
    ) -> torch.Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return shift_labels


class MaskedLMHead(LMHead):
    """Prediction of masked tokens over a base model whose tokens see both sides."""

    output_class = MaskedLMOutput

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # which transformers reads from the class's name, also of a subclass


def slice_logits_to_keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The tokens of (B, L, D) whose logits are wanted; transformers has this function from 5.21 on.

    Args:
        logits_to_keep: the last so many, 0 for all; or indices, of all rows (K,) or of each (B, K); or a mask (B, L),
            which gives (tokens, D).
    """
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.dim() == 1:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep.unsqueeze(-1), 1)
