"""Which layers' reach a teacher's distribution of the next token needs most: each is restored alone.

All layers but one get a window; a layer's score is how much nearer its reach brings the next token's distribution to
the teacher's, in KL divergence (arXiv 2512.20569 selects layers so, with trained students in place of windows).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_hybrid_ssm.evaluation.teacher_scored import continuation
from hf_hybrid_ssm.upcycle.ablations import silent
from hf_hybrid_ssm.upcycle.layer_ranking import LayerRanking, ranking_of
from hf_hybrid_ssm.upcycle.teacher import Teacher
from hf_hybrid_ssm.upcycle.windowed_teacher import LayerReplay, maskable, window_mask

PROBE_WINDOW = 128
ROWS = 4
LENGTH_IN_WINDOWS = 3


@torch.inference_mode()
def rank_layers_by_kl(
    teacher: Teacher,
    texts: Sequence[torch.Tensor],
    window: int = PROBE_WINDOW,
    progress: Callable[[Sequence[Any]], Any] | None = None,
) -> LayerRanking:
    """The layers of a teacher that see all tokens by KL(teacher || windowed), less that with the layer's own reach;
    tokens beyond the window alone count.

    Args:
        texts: token ids (B, L) without padding, L longer than the window, such as `text_of` the teacher.
        window: tokens that a windowed layer sees before its own; the first token too.
        progress: wraps the sequence of rows, as `tqdm` does.

    Raises:
        ValueError: a text ends within the window.
    """
    rows = [row[None] for text in texts for row in text]
    if short := [row.shape[1] for row in rows if row.shape[1] <= window + 1]:
        raise ValueError(f"texts have {short[0]} tokens, which window={window} shows whole: give longer ones.")
    if not rows:
        raise ValueError("texts is empty: give some token ids.")
    layers, device = teacher.layers, teacher.model.device
    won = dict.fromkeys(layers, 0.0)
    tokens = 0
    with maskable(teacher):
        for row in rows if progress is None else progress(rows):
            mask = window_mask(row.shape[1], window, device=device)
            replay = LayerReplay(teacher, row.to(device), dict.fromkeys(layers, mask))
            wanted = _log_distributions(teacher, replay.teachers_own, window)
            whole = _kl(wanted, teacher, replay.base, window)
            for layer in layers:
                states = replay.hidden_states(dict.fromkeys([other for other in layers if other != layer], mask))
                won[layer] += whole - _kl(wanted, teacher, states, window)
            tokens += len(wanted)
    return ranking_of({layer: gain / tokens for layer, gain in won.items()}, "kl", window=window)


@torch.inference_mode()
def rank_layers_by_sensitivity(
    teacher: Teacher, texts: Sequence[torch.Tensor], progress: Callable[[Sequence[Any]], Any] | None = None
) -> LayerRanking:
    """The layers that see all tokens by how much the loss rises, in nats per token, when their attention adds nothing.

    Args:
        texts: token ids (B, L) each; a few thousand tokens are enough.
        progress: wraps the sequence of layers, as `tqdm` does.
    """
    if not texts:
        raise ValueError("texts is empty: give some token ids.")
    model = teacher.model

    def loss() -> float:
        ids = [text.to(model.device) for text in texts]
        return sum(model(text, labels=text, use_cache=False).loss.item() for text in ids) / len(ids)

    whole, rises, layers = loss(), {}, teacher.layers
    for layer in layers if progress is None else progress(layers):
        with teacher.attention_of(layer).register_forward_hook(silent):
            rises[layer] = loss() - whole
    return ranking_of(rises, "sensitivity")


@torch.inference_mode()
def text_of(teacher: Teacher, rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """What a teacher writes, drawn from its own distribution after its first token, or a random one: (rows, length).

    Deterministic in `seed`; leaves the global random number generator alone.
    """
    draw, start = torch.Generator().manual_seed(seed), teacher.config.bos_token_id
    tokens = torch.randint(teacher.config.vocab_size, (rows, 1), generator=draw)
    begin = tokens if start is None else torch.full_like(tokens, start)
    return continuation(teacher.model, begin, length - 1, draw)


def _log_distributions(teacher: Teacher, states: torch.Tensor, window: int) -> torch.Tensor:
    """Of the next token after each beyond the window, in one row, (L - W - 1, V)."""
    return teacher.logits(states[:, window + 1 :])[0].float().log_softmax(-1)


def _kl(wanted: torch.Tensor, teacher: Teacher, states: torch.Tensor, window: int) -> float:
    """KL(wanted || found), the sum over tokens, in nats."""
    log_probabilities = _log_distributions(teacher, states, window)
    return float(torch.nn.functional.kl_div(log_probabilities, wanted, reduction="sum", log_target=True))
