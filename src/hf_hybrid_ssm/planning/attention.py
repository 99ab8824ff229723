"""How many keys a query meets in `local_attention`, which works in blocks and computes what it then masks."""

from typing import NamedTuple


class Reach(NamedTuple):
    """Keys computed for each query, and keys copied for each token (a block's keys overlap those of the next)."""

    keys: float
    copies: float


def reach(length: int, nearest: int | None, farthest: int | None, chunk_size: int | None = None) -> Reach:
    """As `ops.local_attention.vectorised.run` cuts a row of `length` tokens without padding or documents.

    Args:
        nearest, farthest, chunk_size: as of `ops.local_attention.local_attention`.
    """
    span = None if nearest is None or farthest is None else max(farthest - nearest, 16)
    if span is None or length <= span:
        return Reach(length, 1)
    assert nearest is not None and farthest is not None
    if chunk_size is not None:  # the chunks are the blocks
        size, width = chunk_size, chunk_size
    else:
        size = max(span // 2, 16) if nearest < 0 else span
        width = size + farthest - nearest
    filled = -(-length // size) * size / length  # the last block is padded
    return Reach(width * filled, width * filled / size)
