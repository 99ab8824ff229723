"""The documents of packed rows that are cut into blocks."""

import torch


def document_blocks(seq_idx: torch.Tensor | None, block: int) -> torch.Tensor | None:
    """(B, n, w): the document of each token of each block; the last one goes on to the end of the last block."""
    if seq_idx is None:
        return None
    batch, length = seq_idx.shape
    padding = seq_idx[:, -1:].expand(batch, -length % block)
    return torch.cat([seq_idx, padding], dim=1).view(batch, -1, block)


def document_before_block(documents: torch.Tensor) -> torch.Tensor:
    """(B, n, 1): that of the token before each block; the initial state belongs to the row's first document."""
    return torch.cat([documents[:, :1, :1], documents[:, :-1, -1:]], dim=1)
