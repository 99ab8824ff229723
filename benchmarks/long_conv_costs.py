"""What each form of the long convolution computes and moves on a GPU, and which costs least.

Counts are for one output token of one channel; passes over memory are those of kernels that each read their inputs
and write their result once, in float32. `ops/long_conv/thresholds.py` holds what follows from them.

    direct     tap by tap: one pass a tap
    toeplitz   products with tiles of the Toeplitz matrix on the matrix units: quadratic, one pass
    fft        a real FFT of twice the length, its product with the filter's, and back
"""

import math
from typing import NamedTuple

from hf_hybrid_ssm.ops.long_conv.thresholds import TILE, mean_tiles

FLOAT = 4  # bytes


class Rates(NamedTuple):
    """What a data-centre GPU does in a second, as its maker says; the same ratios hold within 2 from A100 to H200."""

    tf32: float = 495e12  # flops of products on the matrix units
    float32: float = 67e12  # flops elsewhere
    bytes: float = 4.8e12
    share: float = 0.5  # of the matrix units' rate that products of 64 x 64 reach


GPU = Rates()


class Cost(NamedTuple):
    """Of one token and channel."""

    matrix_flops: float
    flops: float
    bytes: float

    def seconds(self, rates: Rates = GPU) -> float:
        """Arithmetic and memory overlap: the slower one counts."""
        computing = self.matrix_flops / (rates.tf32 * rates.share) + self.flops / rates.float32
        return max(computing, self.bytes / rates.bytes)


def toeplitz_cost(length: int, taps: int, future: int = 0, *, is_coarse: bool = False) -> Cost:
    """With the transposes to and from channels first. float32 takes three tf32 products, bfloat16 inputs take one."""
    tiles = mean_tiles(length, taps, future)
    return Cost((1 if is_coarse else 3) * 2 * TILE * tiles, 0.0, 6 * FLOAT)


def fft_cost(length: int, taps: int) -> Cost:
    """Real transforms of `length` + `taps` points there and back; the filter's own is shared by the rows of a batch.

    Transposes there and back (4 passes over the tokens), padding, transforms, and the product of the spectra. Above
    2^14 points a transform goes through memory twice.
    """
    size = length + min(taps, length)
    points = size / length
    passes = 2 if size > 1 << 14 else 1
    return Cost(0.0, 2 * 2.5 * points * math.log2(size), FLOAT * (4 + points * (1 + 4 * passes + 3)))


def cheapest(length: int, taps: int, future: int = 0, *, is_coarse: bool = False) -> str:
    """ "toeplitz" or "fft"."""
    products = toeplitz_cost(length, taps, future, is_coarse=is_coarse).seconds()
    return "toeplitz" if products <= fft_cost(length, max(taps, future)).seconds() else "fft"
