"""What the heads of all families share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from hf_hybrid_ssm.models.base import WithoutContinuousBatching
from hf_hybrid_ssm.models.cache_names import (
    CACHE,
    CausalLMOutputWithCache,
    SequenceClassifierOutputWithCache,
    by_both_cache_names,
)
from hf_hybrid_ssm.models.compat import PackedGeneration, slice_logits_to_keep
from hf_hybrid_ssm.models.configuration import STATE_LAYER_TYPE
from hf_hybrid_ssm.models.ended_rows import reads_padding
from hf_hybrid_ssm.models.inputs import check_class_labels, check_labels, check_span, check_token_classes
from hf_hybrid_ssm.models.losses import (
    cross_entropy,
    question_answering_loss,
    sequence_classification_loss,
    token_classification_loss,
)
from hf_hybrid_ssm.models.prefix_reading import GenerationFromPrefixes
from hf_hybrid_ssm.ops.linear_cross_entropy import linear_cross_entropy


class LMHead:
    """A prediction of tokens over the family's base model; placed before the pretrained class, like all heads here."""

    config: Any
    training: bool
    post_init: Callable[[], None]
    loss_function: Callable[..., torch.Tensor]
    base_model_class: type[nn.Module]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: dict[str, str] | None = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.base_model_class(config)
        self.lm_head = self._build_lm_head(config)
        self.post_init()

    def _build_lm_head(self, config: PreTrainedConfig) -> nn.Module:
        return nn.Linear(config.hidden_size, config.vocab_size, bias=False)

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
        labels: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(B, L, D) of the base model and labels (B, L) → logits and loss; a fused loss never holds all logits."""
        hidden_states = self._pre_head(hidden_states)
        if labels is not None and self._uses_fused_loss():
            return None, self._fused_loss(hidden_states, labels, **kwargs)
        logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
        if labels is None:
            return logits, None
        return logits, self.loss_function(
            logits=logits, labels=labels.contiguous(), vocab_size=self.config.vocab_size, **kwargs
        )

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


class CausalLMHead(WithoutContinuousBatching, GenerationFromPrefixes, PackedGeneration, LMHead):
    """Next-token prediction."""

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
    ) -> CausalLMOutputWithPast:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Token ids to predict, equal to `input_ids` (they are shifted inside); -100 is ignored.
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        """
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep} must be 0 (all) or the number of last tokens.")
        if labels is not None:
            inputs = input_ids if inputs_embeds is None else inputs_embeds
            keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
            shape = inputs.shape[:2] if inputs is not None and keeps_all else None
            check_labels(labels, self.config.vocab_size, shape)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            seq_idx=seq_idx,
            **kwargs,
        )
        logits, loss = self._predict(outputs.last_hidden_state, labels, logits_to_keep, **kwargs)
        return CausalLMOutputWithCache(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.cache},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _inputs_of_iteration(self, is_first_iteration: bool) -> dict[str, Any]:
        """No step after the first begins a document, whose positions then need no look; nor does its mask, while all
        rows go on."""
        return {"continues_documents": not is_first_iteration and not reads_padding()}

    @staticmethod
    @by_both_cache_names
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, cache, is_first_iteration=False, **kwargs
    ) -> dict:
        """Masks made ahead of compiled decoding; a generated token is padding only in rows that have ended.

        transformers' `create_recurrent_attention_mask` does not serve: it drops the columns of earlier tokens, and so
        where their padding was, and ignores masks that it does not understand.
        """
        if inputs_embeds.shape[1] == 1 and not is_first_iteration:
            attention_mask = attention_mask[:, -1:] if reads_padding() else None  # of one shape at every step
        return {STATE_LAYER_TYPE: attention_mask}

    def _targets(
        self, labels: torch.Tensor, shift_labels: torch.Tensor | None = None, ignore_index: int = -100, **kwargs: Any
    ) -> torch.Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return shift_labels


class MaskedLMHead(LMHead):
    """Prediction of masked tokens over a base model whose tokens see both sides."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        seq_idx: torch.IntTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The token that belongs at each masked position; -100 elsewhere.
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        """
        if labels is not None:
            inputs = input_ids if inputs_embeds is None else inputs_embeds
            check_labels(labels, self.config.vocab_size, None if inputs is None else inputs.shape[:2])
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            seq_idx=seq_idx,
            **kwargs,
        )
        logits, loss = self._predict(outputs.last_hidden_state, labels, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class SequenceClassificationHead:
    """A linear classifier over the last real token of the family's causal base model.

    The last real token is the last one the attention mask marks as real; without a mask, the last that is not
    `config.pad_token_id`. Either side may be padded. (transformers' generic head goes by `pad_token_id` alone.)
    """

    base_model_class: type[nn.Module]
    config: Any
    post_init: Callable[[], None]
    loss_function: Callable[..., torch.Tensor]
    _loss_function = staticmethod(sequence_classification_loss)

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.num_labels = config.num_labels
        self.model = self.base_model_class(config)
        self.score = nn.Linear(config.hidden_size, self._num_scores(config), bias=False)
        self.post_init()

    def _num_scores(self, config: PreTrainedConfig) -> int:
        return config.num_labels

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
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        r"""
        labels (`torch.Tensor` of shape `(batch_size,)`, *optional*):
            Class indices (or values, for regression with `num_labels == 1`).
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        last = last_real_token(input_ids, attention_mask, self.config.pad_token_id, hidden_states.shape[:2])
        index = torch.arange(hidden_states.shape[0], device=hidden_states.device)
        pooled_logits = self.score(hidden_states[index, last.to(hidden_states.device)])
        loss = None
        if labels is not None:
            check_class_labels(labels, pooled_logits, self.config.problem_type)
            targets = {"labels": labels, "pooled_logits": pooled_logits, "config": self.config}
            loss = self.loss_function(logits=pooled_logits, **targets, **kwargs)
        return SequenceClassifierOutputWithCache(
            loss=loss,
            logits=pooled_logits,
            **{CACHE: outputs.cache},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class MultipleChoiceHead:
    """Which of several texts is right: each gets one score; placed before a sequence classifier's head, which gives
    it."""

    def _num_scores(self, config: PreTrainedConfig) -> int:
        return 1

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        r"""
        input_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`, *optional*):
            The texts to choose from; `attention_mask` and `inputs_embeds` have the choices in the same place.
        labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            The number of the right one.
        """
        texts = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        for name, tensor in texts.items():
            if tensor is not None and tensor.dim() != (4 if name == "inputs_embeds" else 3):
                shape = "(batch, choices, length" + (", hidden_size)" if name == "inputs_embeds" else ")")
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}.")
        choices = next((tensor.shape[1] for tensor in texts.values() if tensor is not None), 1)
        flat = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in texts.items()}
        outputs = super().forward(**flat, **kwargs | {"return_dict": True})  # type: ignore[misc]
        logits = outputs.logits.view(-1, choices)
        loss = None
        if labels is not None:
            check_class_labels(labels, logits, "single_label_classification")
            loss = cross_entropy(logits, labels, kwargs.get("num_items_in_batch"))
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class TokenClassificationHead:
    """One class per token, over the family's base model `base_model_class`; its weights are named as in
    transformers."""

    base_model_class: Callable[[Any], nn.Module]
    config: Any
    post_init: Callable[[], None]
    loss_function: Callable[..., torch.Tensor]
    _loss_function = staticmethod(token_classification_loss)

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.num_labels = config.num_labels
        self.model = self.base_model_class(config)
        rates = (getattr(config, name, None) for name in ("classifier_dropout", "final_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))  # as in transformers
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

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
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The class of each token; -100 is ignored.
        """
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if labels is not None and inputs is not None:
            check_token_classes(labels, inputs.shape[:2], self.config.num_labels)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, config=self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class QuestionAnsweringHead:
    """Start and end of a span, over the family's base model `base_model_class`; its weights are named as in
    transformers."""

    base_model_class: Callable[[Any], nn.Module]
    config: Any
    post_init: Callable[[], None]
    loss_function: Callable[..., torch.Tensor]
    _loss_function = staticmethod(question_answering_loss)

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.base_model_class(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    @by_both_cache_names
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache=None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        r"""
        start_positions, end_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            The first and the last token of the answer; one that lies beyond the row's end adds nothing to the loss,
            which is a mean over all rows.
        """
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is not None:
            check_span(start_positions, end_positions, inputs.shape[0])
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def last_real_token(
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    pad_token_id: int | None,
    shape: torch.Size,
) -> torch.Tensor:
    """Column of each row's last real token, (B,) int64.

    Raises:
        ValueError: a batch of several rows, and nothing that tells padding from text.
    """
    batch, length = shape
    if attention_mask is not None and attention_mask.dim() == 2:
        real = attention_mask[:, -length:] != 0
    elif input_ids is not None and pad_token_id is not None:
        real = input_ids != pad_token_id
    elif batch == 1 or input_ids is None:
        return torch.full((batch,), length - 1)
    else:
        raise ValueError(
            f"A batch of {batch} rows needs an attention_mask or config.pad_token_id to find each row's last token."
        )
    return (torch.arange(length, device=real.device) * real).argmax(1)
