"""A classifier of two texts that are read apart and compared token by token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class ComparedTexts(nn.Module):
    r"""Every token looks for its like in the other text (decomposable attention, arXiv 1606.01933).

    With states a_i and b_j of width d of the two texts, and \alpha_i = \sum_j softmax_j(a_i b_j / \sqrt{d}) b_j, and
    likewise \beta_j of the a_i, a linear map reads the means over a text's tokens of a_i, |a_i - \alpha_i| and
    a_i \alpha_i, and those of the other text, each standardised over the batch: 6 d numbers. An encoder that attends
    from one text to the other has to learn to compare; here it only has to give like tokens like states.

    Args:
        encoder: any model with `last_hidden_state`.
        num_labels: 1 for a regression, by squared error; else the classes.
        middle: what a regression says at first; best the labels' mean.
    """

    def __init__(self, encoder: PreTrainedModel, num_labels: int, middle: float = 0.0):
        super().__init__()
        self.encoder, self.num_labels = encoder, num_labels
        width = 6 * encoder.config.hidden_size
        self.standardise = Standardise(width, affine=False)
        self.classifier = nn.Linear(width, num_labels)
        nn.init.zeros_(self.classifier.weight)
        nn.init.constant_(self.classifier.bias, middle)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> SequenceClassifierOutput:
        """`input_ids` and `attention_mask` (B, 2, L), right-padded; `labels` (B,)."""
        states = self.encoder(input_ids.flatten(0, 1), attention_mask=attention_mask.flatten(0, 1)).last_hidden_state
        first, second = states.float().unflatten(0, (-1, 2)).unbind(1)
        real, other = attention_mask.bool().unbind(1)
        features = torch.cat([compared(first, real, second, other), compared(second, other, first, real)], -1)
        logits = self.classifier(self.standardise(features))
        loss = None
        if labels is not None:
            loss = (
                F.mse_loss(logits[:, 0], labels.float()) if self.num_labels == 1 else F.cross_entropy(logits, labels)
            )
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Standardise(nn.BatchNorm1d):
    """One row has no deviation of its own: a last batch of one is measured by those before it."""

    def forward(self, features: Tensor) -> Tensor:
        if self.training and len(features) == 1:
            return F.batch_norm(features, self.running_mean, self.running_var, eps=self.eps)
        return super().forward(features)


def compared(states: Tensor, real: Tensor, others: Tensor, others_real: Tensor) -> Tensor:
    """(B, L, d), (B, L), (B, M, d), (B, M) → (B, 3 d): the text's means, and those of what its tokens find."""
    found = F.scaled_dot_product_attention(states, others, others, attn_mask=others_real[:, None])
    weights = real / real.sum(1, keepdim=True).clamp(min=1)
    return torch.cat(
        [(weights[..., None] * each).sum(1) for each in (states, (states - found).abs(), states * found)], -1
    )


class PairCollator:
    """Rows of `first`, `second` (token ids) and `labels` → (B, 2, L), padded on the right to the longest text."""

    def __init__(self, pad: int):
        self.pad = pad

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        texts = [torch.tensor(row[part]) for row in rows for part in ("first", "second")]
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=self.pad)
        lengths = torch.tensor([len(text) for text in texts])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        batch = {"input_ids": ids, "attention_mask": mask}
        batch = {name: tensor.unflatten(0, (-1, 2)) for name, tensor in batch.items()}
        return batch | {"labels": torch.tensor([row["labels"] for row in rows])}
