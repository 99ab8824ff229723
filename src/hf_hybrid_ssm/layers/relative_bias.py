"""T5's relative position bias: a learned number for each head and bucket of distances."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from hf_hybrid_ssm.ops.core.constants import constant


def distance_buckets(num_buckets: int, max_distance: int, count: int) -> tuple[int, ...]:
    """The bucket of the distances 0 … count - 1 on one side.

    Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`; all beyond share
    the last one (T5, `_relative_position_bucket`).
    """
    exact = num_buckets // 2

    def bucket(distance: int) -> int:
        if distance < exact:
            return distance
        share = math.log(distance / exact) / math.log(max_distance / exact)
        return min(exact + int(share * (num_buckets - exact)), num_buckets - 1)

    return tuple(bucket(distance) for distance in range(count))


def two_sided_buckets(num_buckets: int, max_distance: int, count: int) -> tuple[int, ...]:
    """The buckets of the distances 1 - count … count - 1; tokens ahead have the later half of the buckets."""
    half = num_buckets // 2
    back = distance_buckets(half, max_distance, count)
    return (*(half + bucket for bucket in reversed(back[1:])), *back)


@constant
def _columns(num_buckets: int, max_distance: int, count: int, two_sided: bool) -> torch.Tensor:
    buckets = two_sided_buckets if two_sided else distance_buckets
    return torch.tensor(buckets(num_buckets, max_distance, count))


class RelativeBias(nn.Embedding):
    """Bias by distance, in the form `ops.local_attention` takes.

    Args:
        num_heads: H.
        num_buckets: rows of the table; two-sided attention uses one half for each side.
        max_distance: from here on all distances share a bucket.
        bidirectional: distances of both signs.
    """

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, *, bidirectional: bool = False):
        super().__init__(num_buckets, num_heads)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def forward(self, left: int | None) -> torch.Tensor:  # type: ignore[override]
        """(H, R): column c is distance c; two-sided, the middle column is 0 and later ones look back.

        Args:
            left: the greatest distance to be asked for; None for all. Distances beyond the table share its ends.
        """
        count = self.max_distance + 1 if left is None else min(left, self.max_distance) + 1
        sizes = (self.num_embeddings, self.max_distance, count, self.bidirectional)
        columns = _columns(*sizes, device=self.weight.device)
        return F.embedding(columns, self.weight).T
