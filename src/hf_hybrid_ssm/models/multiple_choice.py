"""Multiple choice, over the head of a sequence classifier."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import MultipleChoiceModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from hf_hybrid_ssm.models.inputs import check_class_labels


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
        rows = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in texts.items()}
        outputs = super().forward(**rows, **kwargs | {"return_dict": True})  # type: ignore[misc]
        logits = outputs.logits.view(-1, choices)
        loss = None
        if labels is not None:
            check_class_labels(labels, logits, "single_label_classification")
            loss = nn.functional.cross_entropy(logits.float(), labels.to(logits.device))
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
