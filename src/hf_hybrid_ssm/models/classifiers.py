"""The heads that classify rows, tokens, texts to choose from and spans, with the losses that they learn by.

A loss is a sum over targets divided by their number, in this batch or in all of a step. With gradient accumulation
transformers' `Trainer` counts the targets of all micro-batches (labels that are not -100), passes that
`num_items_in_batch` to the forward, and then divides by nothing more: a loss that ignored it would grow with the
number of micro-batches.
"""

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from hf_hybrid_ssm.models.heads import INPUTS, Head, Logits
from hf_hybrid_ssm.models.inputs import INTEGERS, check_integers, check_shape
from hf_hybrid_ssm.models.outputs import SequenceClassifierWithCache, by_both_cache_names
from hf_hybrid_ssm.ops.core.checks import can_read_values

Count: TypeAlias = torch.Tensor | int | None


def sequence_classification_loss(
    labels: torch.Tensor, pooled_logits: torch.Tensor, config: Any, num_items_in_batch: Count = None, **kwargs: Any
) -> torch.Tensor:
    """Cross-entropy of classes, squared error of values, or binary cross-entropy of several labels, whichever
    `config.problem_type` says; None there is replaced by what the labels look like, as in transformers.

    Args:
        labels: (B,) class indices, -100 to ignore a row; or (B,) or (B, C) values.
        pooled_logits: (B, C).
        num_items_in_batch: what the sum is divided by, elements of `labels` that are not -100; by default this
            batch's.

    Raises:
        TypeError: `labels` is not a tensor, or class indices are not integers.
        ValueError: wrong shape, or a class index outside of 0 … C - 1.
    """
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}.")
    batch, classes = pooled_logits.shape
    looks_like = "single_label_classification" if labels.dtype in INTEGERS else "multi_label_classification"
    kind = config.problem_type or ("regression" if classes == 1 else looks_like)
    if kind == "single_label_classification":
        loss = choice_loss(pooled_logits, labels, num_items_in_batch, kwargs.get("ignore_index", -100))
    elif labels.numel() != batch * classes:
        raise ValueError(
            f"labels must have shape (batch, num_labels) = ({batch}, {classes}) for {kind}, got {tuple(labels.shape)}."
        )
    else:
        of_each = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
        logits = _wide(pooled_logits)
        wanted = labels.to(logits.device, logits.dtype).reshape(logits.shape)
        loss = _divided(of_each(logits, wanted, reduction="sum"), wanted.numel(), num_items_in_batch)
    config.problem_type = kind
    return loss


def choice_loss(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Count = None, ignore_index: int = -100
) -> torch.Tensor:
    """`cross_entropy` of the choice of each row (B, C).

    Raises:
        TypeError: `labels` is not a tensor of class indices.
        ValueError: they are not (B,), or one is no class.
    """
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}.")
    if labels.dtype not in INTEGERS:
        raise TypeError(f"labels must be int32 or int64 class indices of a single choice, got {labels.dtype}.")
    if labels.numel() != len(logits):
        raise ValueError(f"labels must have shape (batch,) = ({len(logits)},), got {tuple(labels.shape)}.")
    return cross_entropy(logits, labels, num_items_in_batch, ignore_index)


def token_classification_loss(
    logits: torch.Tensor, labels: torch.Tensor, config: Any = None, num_items_in_batch: Count = None, **kwargs: Any
) -> torch.Tensor:
    """Cross-entropy of (B, L, C) at the tokens whose class (B, L) is not `ignore_index`, -100 by default.

    Raises:
        TypeError: `labels` is not an integer tensor.
        ValueError: another shape, or a class that does not exist.
    """
    check_integers("labels", labels)
    check_shape(labels, logits.shape[:2])
    return cross_entropy(logits.flatten(0, 1), labels, num_items_in_batch, kwargs.get("ignore_index", -100))


def question_answering_loss(
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    start_positions: torch.Tensor | None,
    end_positions: torch.Tensor | None,
    num_items_in_batch: Count = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Half the cross-entropy of the start (B, L) and half that of the end; a position beyond the row adds nothing.

    The sum is divided by the rows of this batch, or by `num_items_in_batch` rows. (transformers divides each half by
    the positions within their rows. The `Trainer` does not count them, so that micro-batches with fewer of them would
    weigh more, and one without any would be NaN.)

    Raises:
        TypeError: positions are not integer tensors.
        ValueError: one is missing, has another shape than (B,) or (B, 1), or a negative position.
    """
    batch, length = start_logits.shape
    ends = {"start_positions": (start_logits, start_positions), "end_positions": (end_logits, end_positions)}
    total = start_logits.new_zeros((), dtype=_wide(start_logits).dtype)
    for name, (logits, at) in ends.items():
        if at is None:
            raise ValueError(f"{name} is missing: a loss needs both start_positions and end_positions.")
        check_integers(name, at)
        if at.shape not in ((batch,), (batch, 1)):
            raise ValueError(f"{name} must have shape (batch,) = ({batch},), got {tuple(at.shape)}.")
        if can_read_values(at) and bool((at < 0).any()):
            raise ValueError(f"{name} must be at least 0, got {int(at.min())}.")
        at = at.to(logits.device).reshape(-1).clamp(max=length)
        total = total + F.cross_entropy(_wide(logits), at, ignore_index=length, reduction="sum")
    return _divided(total / 2, batch, num_items_in_batch)


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Count = None, ignore_index: int = -100
) -> torch.Tensor:
    """Of (N, C) and N class indices, `ignore_index` to ignore one: the mean over the others, or their sum divided by
    `num_items_in_batch`.

    Raises:
        ValueError: a class that does not exist.
    """
    classes = logits.shape[1]
    if can_read_values(labels) and bool(((labels < 0) & (labels != ignore_index) | (labels >= classes)).any()):
        raise ValueError(
            f"labels has classes from {int(labels.min())} to {int(labels.max())}, but num_labels={classes}: they must "
            f"lie in 0..{classes - 1}, or be {ignore_index}."
        )
    classes_of_rows = labels.to(logits.device).reshape(-1).long()
    return fixed_cross_entropy(_wide(logits), classes_of_rows, num_items_in_batch, ignore_index)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _divided(total: torch.Tensor, of_this_batch: int, num_items_in_batch: Count) -> torch.Tensor:
    if num_items_in_batch is None:
        return total / of_this_batch
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


class SequenceClassificationHead(Head):
    """A linear classifier over the last real token of the family's causal base model.

    The last real token is the last one the attention mask marks as real; without a mask, the last that is not
    `config.pad_token_id`. Either side may be padded. (transformers' generic head goes by `pad_token_id` alone.)
    """

    output_class = SequenceClassifierWithCache
    _loss_function = staticmethod(sequence_classification_loss)

    def _build_head(self, config: Any) -> None:
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, self._num_scores(config), bias=False)

    def _num_scores(self, config: Any) -> int:
        return config.num_labels

    def _read(self, hidden_states: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        tokens = inputs["input_ids"], inputs["attention_mask"]
        last = last_real_token(*tokens, self.config.pad_token_id, hidden_states.shape[:2]).to(hidden_states.device)
        return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), last]

    def _logits(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.score(pooled)

    def _loss(self, logits: Logits, targets: Any, **options: Any) -> torch.Tensor:
        return super()._loss(logits, targets, pooled_logits=logits, **options)


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
        options = kwargs.get("num_items_in_batch"), kwargs.get("ignore_index", -100)
        loss = None if labels is None else choice_loss(logits, labels, *options)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class TokenClassificationHead(Head):
    """One class per token; its weights are named as in transformers."""

    output_class = TokenClassifierOutput
    _loss_function = staticmethod(token_classification_loss)

    def _build_head(self, config: Any) -> None:
        self.num_labels = config.num_labels
        rates = (getattr(config, name, None) for name in ("classifier_dropout", "final_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))  # as in transformers
        self.score = nn.Linear(config.hidden_size, config.num_labels)

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.score(self.dropout(hidden_states))


class QuestionAnsweringHead(Head):
    """Start and end of a span; its weights are named as in transformers."""

    output_class = QuestionAnsweringModelOutput
    _loss_function = staticmethod(question_answering_loss)

    def _build_head(self, config: Any) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

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
        inputs = (input_ids, attention_mask, position_ids, cache, inputs_embeds)
        is_asked = start_positions is not None or end_positions is not None
        targets = (start_positions, end_positions) if is_asked else None
        return self._forward(dict(zip(INPUTS, inputs)), targets, {}, kwargs)

    def _logits(self, hidden_states: torch.Tensor) -> Logits:
        return self.qa_outputs(hidden_states).unbind(-1)

    def _loss(self, logits: Logits, targets: Any, **options: Any) -> torch.Tensor:
        return self.loss_function(*logits, *targets, **options)

    def _output(self, logits: Logits, **fields: Any) -> Any:
        start, end = logits
        return self.output_class(start_logits=start.contiguous(), end_logits=end.contiguous(), **fields)


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
