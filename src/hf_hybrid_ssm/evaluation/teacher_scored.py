"""What a student writes, scored by its teacher: does it stay within what the teacher would say?"""

from typing import Any

import torch

from hf_hybrid_ssm.evaluation.position_loss import loss_by_position
from hf_hybrid_ssm.models.outputs import CACHE


@torch.inference_mode()
def teacher_scored_generation(
    model: Any, teacher: Any, input_ids: torch.Tensor, new_tokens: int, seed: int | None = None
) -> torch.Tensor:
    """The teacher's loss of each token that a model writes after the prompts, in nats: float32 (B, new_tokens).

    Compare with the teacher's score of its own writing (`model=teacher`), drawn alike. A text that repeats itself
    scores low too: read the mean beside a sample.

    Args:
        input_ids: prompts (B, L) of one length.
        seed: of draws from the model's distribution; None: the most probable token.

    Raises:
        ValueError: nothing is to be written, or the vocabularies differ.
    """
    if new_tokens < 1:
        raise ValueError(f"new_tokens={new_tokens} must be at least 1.")
    if model.config.vocab_size != teacher.config.vocab_size:
        raise ValueError(
            f"vocab_size={model.config.vocab_size} of the model and {teacher.config.vocab_size} of the teacher differ."
        )
    draw = None if seed is None else torch.Generator().manual_seed(seed)
    written = continuation(model, input_ids, new_tokens, draw)
    return loss_by_position(teacher, written)[:, input_ids.shape[1] - 1 :]


@torch.inference_mode()
def continuation(
    model: Any, input_ids: torch.Tensor, new_tokens: int, draw: torch.Generator | None = None
) -> torch.Tensor:
    """Prompts (B, L) and what a model writes after them: (B, L + new_tokens), on the CPU.

    Args:
        draw: of tokens from the model's distribution; None: the most probable token.
    """
    training, cache, ids = model.training, None, [input_ids.cpu()]
    model.eval()
    try:
        for _ in range(new_tokens):
            output = model(ids[-1].to(model.device), use_cache=True, **{CACHE: cache})
            cache, logits = output[CACHE], output.logits[:, -1].float().cpu()
            best = logits.argmax(-1, keepdim=True)
            ids.append(best if draw is None else torch.multinomial(logits.softmax(-1), 1, generator=draw))
    finally:
        model.train(training)
    return torch.cat(ids, dim=1)
