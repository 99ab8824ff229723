"""Which form of the long convolution costs least on a card, by counting what each computes and moves.

Counts are for one output token of one channel; passes over memory are those of kernels that each read their inputs
and write their result once, in float32. `benchmarks/long_conv_counts.py` prints them by length.

    direct     tap by tap: one pass a tap
    toeplitz   products with tiles of the Toeplitz matrix on the matrix units: quadratic, one pass
    fft        a real FFT of twice the length, its product with the filter's, and back
    monarch    the same transform as products with two small Fourier matrices, each a matrix product of torch
"""

import math
from typing import NamedTuple

DIRECT = 16  # taps, up to which the sum tap by tap is a few fused operations
TILE = 64  # tokens of a Toeplitz tile
FLOAT = 4  # bytes


class Card(NamedTuple):
    """What a data-centre card does in a second, as its maker says; the same ratios hold within 2 from A100 to H200."""

    tf32: float = 495e12  # flops of products on the matrix units
    float32: float = 67e12  # flops elsewhere
    bytes: float = 4.8e12
    share: float = 0.5  # of the matrix units' rate that products of 64 x 64 reach


CARD = Card()


class Cost(NamedTuple):
    """Of one token and channel."""

    matrix_flops: float
    flops: float
    bytes: float

    def seconds(self, card: Card = CARD) -> float:
        """Arithmetic and memory overlap: the slower one counts."""
        computing = self.matrix_flops / (card.tf32 * card.share) + self.flops / card.float32
        return max(computing, self.bytes / card.bytes)


def toeplitz_cost(length: int, taps: int, future: int = 0, *, is_coarse: bool = False) -> Cost:
    """Tiles that the taps of the past and of the future reach, on average over the row's blocks; with the transposes
    to and from channels first. float32 takes three tf32 products, bfloat16 inputs take one."""
    blocks = math.ceil(length / TILE)
    back, ahead = min(math.ceil((taps - 1) / TILE) + 1, blocks), min(math.ceil(future / TILE), blocks - 1)
    tiles = back * (2 * blocks - back + 1) / 2 + ahead * (2 * blocks - ahead - 1) / 2
    return Cost((1 if is_coarse else 3) * 2 * TILE * tiles / blocks, 0.0, 6 * FLOAT)


def fft_cost(length: int, taps: int) -> Cost:
    """Real transforms of `length` + `taps` points there and back; the filter's own is shared by the rows of a batch.

    Transposes there and back (4 passes over the tokens), padding, transforms, and the product of the spectra. Above
    2^14 points a transform goes through memory twice.
    """
    size = length + min(taps, length)
    points = size / length
    passes = 2 if size > 1 << 14 else 1
    return Cost(0.0, 2 * 2.5 * points * math.log2(size), FLOAT * (4 + points * (1 + 4 * passes + 3)))


def monarch_cost(length: int, taps: int) -> Cost:
    """Two stages there and two back, each a product of real matrices that hold real and imaginary parts, written to
    memory and read again as twiddle factors and the next stage need it."""
    size = length + min(taps, length)
    points, root = size / length, math.sqrt(size)
    products = 2 * points * (4 * root + 8 * root)
    stages = 2 * (1 + 2) + 4 * (2 + 2)  # real to complex there and back; twiddles and the second stage, complex
    return Cost(3 * products, 0.0, FLOAT * (4 + points * (2 + stages + 3 * 2)))


def choose(length: int, taps: int, future: int = 0, *, is_coarse: bool = False) -> str:
    """The form of least cost: "direct", "toeplitz" or "fft". "monarch" is only counted: unless one kernel did all of
    its stages, it moves more than "fft" at any length."""
    if taps + future <= DIRECT:
        return "direct"
    toeplitz = toeplitz_cost(length, taps, future, is_coarse=is_coarse).seconds()
    return "toeplitz" if toeplitz <= fft_cost(length, max(taps, future)).seconds() else "fft"
